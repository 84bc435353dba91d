"""Run-ahead of drafts and the passes over them: the text is that of plain decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from outstride import registry
from outstride.core.contracts import Acceptor, Exactness, Method
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.engine.engine import Engine
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import attach
from outstride.ops.cuda import available
from tests.models.drive import random_decoder, tiny, tokens
from tests.models.test_draft_heads import on_gpu, part_tensors, write_part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not available(), reason="needs an NVIDIA GPU and Triton"),
]
LENGTH = 60


def generate(
    model: Decoder, method: Method, prompt: list[int], *, temperature: float = 0.0, others: int = 0
) -> list[int]:
    """The tokens of a request, with some others in the batch that come and go."""
    engine = Engine({TARGET: model})
    params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=3, ignore_eos=True)
    sequence = engine.submit(prompt, params, method)
    steps = 0
    while engine.busy:
        if others and steps % 9 == 5:
            short = SamplingParams(max_tokens=3, ignore_eos=True)
            engine.submit(tokens(5, seed=steps), short, registry.build("plain"))
        engine.step()
        steps += 1
        if steps % 9 == 5:
            others -= 1
    assert sequence.error is None
    return list(sequence.tokens)


def bigrams(tensors: dict[str, torch.Tensor], said: list[int]) -> None:
    """Makes a draft head predict, of the 16 most frequent tokens, the one that followed last time."""
    listed = sorted(token for token, _ in Counter(said).most_common(16))
    place = {token: i for i, token in enumerate(listed)}
    before, after = torch.zeros(len(listed) + 1, 16), 1000 * torch.eye(len(listed), 16)
    for one, two in pairwise(said):
        if two in place:
            row = place.get(one, len(listed))
            before[row] = 0
            before[row, place[two]] = 1
    tensors["vocabulary"] = torch.tensor(listed, dtype=torch.int32)
    tensors["follow.before.weight"], tensors["follow.after.weight"] = before, after


@pytest.fixture
def model() -> Decoder:
    registry.discover()
    return random_decoder(tiny(layers=3, tied=True), pages=64, make_ops=on_gpu, rounded=True)


def drafting(part: str) -> Method:
    method = registry.build("block-drafter:width=1,nodes=4")
    method.drafter.draft_heads = (part,)
    return method


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_that_of_plain_decoding(
    model: Decoder, tmp_path: Path, temperature: float, window: int | None
) -> None:
    config = tiny(layers=3, tied=True)
    taken = Counter[bool]()
    for seed in range(3):
        prompt = tokens(20 + 45 * seed, seed=seed)
        plain = generate(model, registry.build("plain"), prompt, temperature=temperature)
        part = part_tensors(config)
        bigrams(part, plain)
        name = f"part {seed}"
        attach(model, name, write_part(tmp_path / name, config, part, window=window), "abc")
        run_ahead = model.ops._run_ahead  # type: ignore[attr-defined]
        match = run_ahead._match_draft

        def counted(ahead: object, work: object, match: object = match) -> object:
            found = match(ahead, work)  # type: ignore[operator]
            taken[found is not None] += 1
            return found

        run_ahead._match_draft = counted
        drafted = drafting(name)
        assert generate(model, drafted, prompt, temperature=temperature) == plain
        assert generate(model, drafted, prompt, temperature=temperature, others=4) == plain
        run_ahead._match_draft = match
    assert taken[True] > 3 * taken[False], "most of what was launched early was not asked for"


def test_draft_heads_of_one_model_do_not_mix_up_their_chains(
    model: Decoder, tmp_path: Path
) -> None:
    """Passes are captured; each has to read the chain of the draft head that drafted for it."""
    config = tiny(layers=3, tied=True)
    prompts = [tokens(20 + 30 * seed, seed=seed) for seed in range(3)]
    said = [generate(model, registry.build("plain"), prompt) for prompt in prompts]
    for number, window in enumerate((None, 24)):
        part = part_tensors(config)
        bigrams(part, said[number])
        folder = write_part(tmp_path / str(number), config, part, window=window)
        attach(model, f"part {number}", folder, "abc")
    for _ in range(3):  # seen, captured, replayed
        for number in range(2):
            for prompt, plain in zip(prompts, said, strict=True):
                assert generate(model, drafting(f"part {number}"), prompt) == plain


class Everything(Acceptor):
    """Accepts all that was drafted."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, last = proposal.graph, len(proposal.graph) - 1
        places = [Position(int(place)) for place in graph.positions]
        settled = {places[node]: TokenId(int(graph.tokens[node])) for node in range(1, last + 1)}
        settled[Position(places[last] + 1)] = scores.token(NodeId(last))
        return Verdict(settled=settled, keep=tuple(map(NodeId, range(last + 1))))


def test_no_run_ahead_where_more_is_accepted_than_is_equal(model: Decoder, tmp_path: Path) -> None:
    config, prompt = tiny(layers=3, tied=True), tokens(30)
    attach(model, "part", write_part(tmp_path / "part", config, part_tensors(config)), "abc")
    exact = drafting("part")
    loose = replace(exact, acceptor=Everything(), exactness=Exactness.LOSSY)
    hits = model.ops._run_ahead.draft_hits  # type: ignore[attr-defined]
    found = generate(model, loose, prompt)
    hits.rate = -1e9
    assert generate(model, loose, prompt) == found


def test_a_wrong_count_of_accepted_tokens_is_noticed(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the GPU counts one accepted token less than there are."""
    from outstride.ops.cuda import launch
    from outstride.ops.cuda.run_ahead.realign import realign

    config, prompt = tiny(layers=3, tied=True), tokens(30)
    plain = generate(model, registry.build("plain"), prompt)
    part = part_tensors(config)
    bigrams(part, plain)
    attach(model, "part", write_part(tmp_path / "part", config, part), "abc")

    def wrong(words, best, drafted, state, *others, draft):  # type: ignore[no-untyped-def]
        realign(words, best, drafted, state, *others, draft=draft)
        if draft:
            state[0] = torch.clamp(state[0] - 1, min=0)

    monkeypatch.setattr(launch, "realign", wrong)
    assert generate(model, drafting("part"), prompt) != plain
