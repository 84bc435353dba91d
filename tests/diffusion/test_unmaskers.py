"""Each method settles the predictions of its rule: tables with one right answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.core.contracts import FULL, AttentionPattern, MaskedSpec
from outstride.core.graph import FloatArray, block
from outstride.core.params import SamplingParams
from outstride.core.prefix_key import PrefixKey
from outstride.core.proposal import Proposal, Verdict, Wants
from outstride.core.sampling import GREEDY
from outstride.core.scoring import select
from outstride.core.sequence import EngineContext, View
from outstride.core.sequence import Sequence as Line
from outstride.diffusion.canvas import CanvasMemory
from outstride.diffusion.token_automaton import PathSlot, TokenAutomaton
from outstride.errors import UnknownMethod

registry.discover()
VOCABULARY, PROMPT = 6, [1, 2]
MASK = VOCABULARY


def row(token: int, probability: float) -> FloatArray:
    """Logits under which a token has a probability, and the others share the rest."""
    others = math.log((1.0 - probability) / (VOCABULARY - 1))
    logits = np.full(VOCABULARY, others, dtype=np.float32)
    logits[token] = math.log(probability)
    return logits


def sequence(length: int, method: Any, canvas: Mapping[int, int], state: Any) -> Line:
    line = Line(
        id=0,
        request=0,
        tokens=list(PROMPT),
        prompt_length=len(PROMPT),
        params=SamplingParams(max_tokens=length),
        seed=3,
        method=method,
        limit=len(PROMPT) + length,
        key=PrefixKey(pattern=FULL),
    )
    line.canvas, line.state = dict(canvas), state
    return line


def verdict_on(
    spec: str,
    rows: Sequence[FloatArray],
    *,
    canvas: Mapping[int, int] | None = None,
    state: Any = None,
    drafted: Mapping[int, FloatArray] | None = None,
    vision: AttentionPattern = FULL,
) -> Verdict:
    """The verdict on a canvas after the prompt, whose open positions have these rows in turn."""
    method, settled = registry.build(spec), canvas or {}
    line = sequence(len(rows) + len(settled), method, settled, state)
    masking = MaskedSpec(MASK, None, shifted=False, causal=False)
    setting = EngineContext({"target": masking}, (), lambda t: b"abcdef"[t : t + 1], VOCABULARY)
    view = View(line, {"target": vision}, line.limit, 0, context=setting)
    places = range(line.limit)
    graph = block([MASK if (t := view.token_at(p)) is None else t for p in places], 0)
    open_ = [p for p in places if view.token_at(p) is None]
    wants = Wants(nodes=tuple(open_), logprobs=2, logits=True)
    proposal = Proposal(graph, 0, offset=0, wants=wants, sampling=GREEDY)
    proposal.drafted = drafted or {}
    scores = select(proposal, np.asarray(open_), np.asarray(rows, dtype=np.float32))
    return method.acceptor.accept(view, proposal, scores)


def settled(spec: str, probabilities: Sequence[float], **more: Any) -> list[int]:
    """Which positions of the answer are settled, if their best tokens have these probabilities."""
    verdict = verdict_on(
        spec, [row(i % VOCABULARY, c) for i, c in enumerate(probabilities)], **more
    )
    return sorted(int(p) - len(PROMPT) for p in verdict.settled)


@pytest.mark.parametrize(
    ("spec", "probabilities", "expected"),
    [
        ("steps:count=2", [0.5, 0.9, 0.7, 0.8], [1, 3]),
        ("steps:count=2,order=margin", [0.5, 0.9, 0.7, 0.8], [1, 3]),
        ("steps:order=entropy", [0.5, 0.6, 0.95, 0.8], [2]),
        ("steps:order=steady", [0.5, 0.901, 0.904, 0.8], [1]),
        ("steps:block=2", [0.5, 0.6, 0.95, 0.8], [2]),  # the drafter asks about its block only
        ("threshold:threshold=0.8", [0.5, 0.9, 0.79, 0.81], [1, 3]),
        ("threshold:threshold=0.99", [0.5, 0.9, 0.7, 0.8], [1]),
        # 2 * 0.05 < 1, 3 * 0.1 < 1, 4 * 0.3 > 1
        ("factor:factor=1", [0.95, 0.9, 0.7, 0.3], [0, 1]),
        ("factor:factor=0.25", [0.95, 0.9, 0.7, 0.3], [0]),
        ("entropy-bound:bound=0", [0.95, 0.9, 0.7, 0.3], [0]),
        ("entropy-bound:bound=100", [0.95, 0.9, 0.7, 0.3], [0, 1, 2, 3]),
        # 0.28 nats at 0.95 and 0.49 at 0.9: the second enters free, the third needs 0.77
        ("entropy-bound:bound=0.5", [0.95, 0.9, 0.7, 0.3], [0, 1]),
        ("dilated", [0.5] * 8, [0, 4]),
        ("dilated:base=4", [0.5] * 8, [0, 2, 4, 6]),
        ("dilated:min_prob=0.6", [0.5, 0.5, 0.7, 0.7, 0.5, 0.5, 0.5, 0.5], [2]),
        ("leap:anchor=0.9,relaxed=0.6,radius=1", [0.7, 0.92, 0.65, 0.7, 0.5], [0, 1, 2]),
        ("leap:anchor=0.95,relaxed=0.6,radius=1", [0.7, 0.92, 0.65, 0.7, 0.5], [1]),
        ("gap:early=2", [0.9, 0.9, 0.9], [0, 1, 2]),
        ("gap:early=9", [0.9, 0.95, 0.9], [1]),
        ("adaptive-block:threshold=0.8,delimiters=2,sure=0.3,block=6", [0.9, 0.5, 0.4, 0.9], [0]),
        (
            "adaptive-block:threshold=0.8,delimiters=5,sure=0.3,block=6",
            [0.9, 0.5, 0.4, 0.9],
            [0, 3],
        ),
        ("adaptive-block:threshold=0.1,shortest=1,block=6", [0.9, 0.85, 0.2, 0.19], [0, 1]),
        ("pipeline:threshold=0.8,block=2,depth=2,start=0", [0.5, 0.6, 0.9, 0.5], [1, 2]),
        ("pipeline:threshold=0.8,block=2,depth=1", [0.5, 0.6, 0.9, 0.5], [1]),
        ("pipeline:threshold=0.5,block=4,penalty=0.2", [0.5, 0.6, 0.95, 0.95], [0, 2]),
    ],
)
def test_rules(spec: str, probabilities: list[float], expected: list[int]) -> None:
    assert settled(spec, probabilities) == expected


def test_a_random_order_depends_on_the_seed_and_the_progress_alone() -> None:
    firsts = [settled("steps:order=random", [0.5] * 6) for _ in range(3)]
    assert firsts[0] == firsts[1] == firsts[2]
    later = settled("steps:order=random", [0.5] * 5, canvas={len(PROMPT) + 5: 1})
    assert later != firsts[0], "a later step has another order (for this seed)"


def test_the_lead_has_to_be_wider_early_in_the_answer() -> None:
    probabilities = [0.6, 0.6]
    assert settled("gap:early=9,middle=9,late=1", probabilities) == [0]
    done = {len(PROMPT) + i: 1 for i in range(2, 8)}
    assert settled("gap:early=9,middle=9,late=1", probabilities, canvas=done) == [0, 1]


def test_steady_predictions_earn_credit() -> None:
    rows = [row(3, 0.5), row(4, 0.5)]
    verdict = verdict_on("credit:threshold=0.7", rows)
    assert len(verdict.settled) == 1, "nothing is sure yet"
    rich = CanvasMemory(note={len(PROMPT): {3: 4.0}, len(PROMPT) + 1: {2: 4.0}})
    verdict = verdict_on("credit:threshold=0.7", rows, state=rich)
    assert dict(verdict.settled) == {len(PROMPT): 3}, (
        "only the steady prediction gained probability"
    )
    assert len(verdict_on("credit:threshold=0.7,weight=0", rows, state=rich).settled) == 1
    assert verdict.note[len(PROMPT) + 1][2] == pytest.approx(0.7 * 4.0), "credit fades"


def test_nothing_is_settled_before_beliefs_converge() -> None:
    rows = [row(3, 0.95), row(4, 0.5)]
    spec = "refine:threshold=0.9,latent=2,calm=0.01,still=0.0001,blend=0.5,tokens=2"
    first = verdict_on(spec, rows)
    assert not first.settled
    mixture = first.note.inputs[len(PROMPT)]
    assert mixture.tokens[:2] == (MASK, 3)
    assert sum(mixture.weights) == pytest.approx(1.0)
    assert mixture.weights[0] < first.note.inputs[len(PROMPT) + 1].weights[0], "surer, less mask"
    moved = verdict_on(spec, [row(3, 0.6), row(4, 0.9)], state=CanvasMemory(note=first.note))
    assert not moved.settled
    later = verdict_on(spec, [row(3, 0.95), row(4, 0.5)], state=CanvasMemory(note=moved.note))
    assert set(later.settled) == {len(PROMPT)}, "`latent` passes are over"
    still = verdict_on(spec, rows, state=CanvasMemory(note=first.note))
    assert set(still.settled) == {2, 3}, "nothing moves: all is settled"


def test_a_run_ends_where_the_guide_disagrees() -> None:
    rows = [row(3, 0.6), row(4, 0.6), row(5, 0.6)]
    read = CanvasMemory(note={2: 3, 3: 4, 4: 5})
    same = {2 + i: np.log(np.exp(r) / np.exp(r).sum()) for i, r in enumerate(rows)}
    agreed = verdict_on("guided:model=x", rows, state=read, drafted=same)
    assert dict(agreed.settled) == {2: 3, 3: 4, 4: 5}
    other = {**same, 3: row(0, 0.9)}
    product = verdict_on("guided:model=x", rows, state=read, drafted=other)
    assert dict(product.settled) == {2: 3, 3: 0}, (
        "the product has the guide's token, and the run ends there"
    )
    objected = verdict_on("guided:model=x,agree=true", rows, state=read, drafted=other)
    assert dict(objected.settled) == {2: 3, 3: 4}
    own = verdict_on("guided:model=x,weight=1", rows, state=read, drafted=other)
    assert dict(own.settled) == {2: 3, 3: 4, 4: 5}
    assert len(verdict_on("guided:model=x", rows, drafted=other).settled) == 1, "nothing was read"


def spelled(token: int) -> bytes:
    return (b"a", b"b", b"c", b"ab", b"", b"\xff")[token]


@pytest.mark.parametrize("pattern", ["(ab)+c?", "[ab]{3}", "a(b|c)*", "(a|b|c)*", "c|abab"])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_path_is_the_best_of_all_texts(pattern: str, seed: int) -> None:
    """Compared with every text of four positions, with an end of text (token 4) allowed or not."""
    import re

    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(4, VOCABULARY)).astype(np.float32)
    machine, endings = TokenAutomaton(pattern, spelled, VOCABULARY), (4,) if seed % 2 else ()
    fixed = {1: 1} if seed == 3 else {}
    slots = [PathSlot(None if i in fixed else rows[i], fixed.get(i), endings) for i in range(4)]
    path = machine.best_path(machine.initial, slots, 0)

    def value(text: tuple[int, ...]) -> float | None:
        ended = text.index(4) if 4 in text else len(text)
        if (ended < len(text) and not endings) or any(
            fixed.get(i, t) != t for i, t in enumerate(text[:ended])
        ):
            return None
        spelling = b"".join(map(spelled, text[:ended]))
        if 5 in text[:ended] or not re.fullmatch(pattern, spelling.decode("latin-1")):
            return None
        return sum(float(rows[i, t]) for i, t in enumerate(text[: ended + 1]) if i not in fixed)

    texts = itertools.product(range(VOCABULARY), repeat=4)
    found = [v for text in texts if (v := value(text)) is not None]
    if not found:
        assert path is None
        return
    assert path is not None
    got = sum(float(rows[i, t]) for i, t in enumerate(path) if t is not None and i not in fixed)
    assert got == pytest.approx(max(found))


def test_a_path_must_be_completable() -> None:
    machine = TokenAutomaton("a{4}", spelled, VOCABULARY)
    slots = [PathSlot(row(0, 0.9), None, ()) for _ in range(2)]
    assert machine.best_path(machine.initial, slots, tokens_left=2) == [0, 0]
    assert machine.best_path(machine.initial, slots, tokens_left=1) is None
    assert machine.read([0, 0, 1]) is None


@pytest.mark.parametrize(
    "spec",
    [
        "steps:count=0",
        "steps:order=best",
        "threshold:threshold=0",
        "threshold:cache=all",
        "threshold:refresh=-1",
        "factor:factor=0",
        "entropy-bound:bound=-1",
        "dilated:base=1",
        "leap:anchor=0.5,relaxed=0.6",
        "credit:decay=2",
        "gap:late=-1",
        "adaptive-block:shortest=40",
        "adaptive-block:delimiters=x",
        "refine:blend=2",
        "refine:calm=-1",
        "guided:model=x,weight=2",
        "verify:ahead=0",
        "any-subset:order=up",
        "pipeline:start=0.9,due=0.5",
        "pipeline:depth=0",
        "regex:pattern=[a",
        "regex:pattern=a,threshold=0",
        "diffuse:model=x,width=0",
        "self-diffuse:length=1",
    ],
)
def test_options_that_make_no_sense_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod):
        registry.build(spec)


def test_a_pattern_may_contain_commas() -> None:
    entry, values = registry.parse("regex:pattern=[a-z]{2,3}(,x)?,threshold=0.5")
    assert entry.name == "regex"
    assert values == {"pattern": "[a-z]{2,3}(,x)?", "threshold": 0.5}
