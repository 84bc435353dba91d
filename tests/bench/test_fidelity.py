"""Fidelity, on small random decoders: close where it is close, far where something is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outstride.bench import fidelity
from outstride.bench.fidelity import Fidelity, FidelityReport
from outstride.core.proposal import TARGET
from outstride.engine.model_runner import ModelRunner
from outstride.errors import InvalidParams, InvalidPrompt
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.cli.shell import Shell
from tests.models.drive import random_decoder, tiny, tokens

TEXTS = [(f"text {i}", tokens(count, seed=i)) for i, count in enumerate((300, 2, 40))]

needs_kernels = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)


def passes_on(make_ops: Callable[[ModelWeights], Ops], **changes: object) -> ModelRunner:
    return ModelRunner({TARGET: random_decoder(tiny(**changes), make_ops=make_ops)}, ())


def broken(model: ModelWeights) -> Ops:
    """The native operations with one wrong matrix."""
    model.layers[1].down.neg_()
    return Cpu.of(model)


def compared(make_ops: Callable[[ModelWeights], Ops]) -> FidelityReport:
    with Fidelity(TEXTS) as held:
        held.record(passes_on(Reference))
        passes = passes_on(make_ops)
        report = held.compare(passes)
    passes.pools[TARGET].check_integrity([])
    assert passes.pools[TARGET].available == 64
    return report


def test_a_model_is_itself() -> None:
    report = compared(Reference)
    assert [case.tokens for case in report.cases] == [299, 1, 39]
    assert report.kl == 0
    assert report.same == 1
    assert report.loss == report.reference_loss > 0
    assert report.met


@needs_kernels
def test_int8_is_close_and_a_wrong_weight_is_not() -> None:
    close, far = compared(Cpu.of), compared(broken)
    assert 0 < close.kl < 0.75 * fidelity.MAX_KL
    assert close.same > 0.9  # of 339 tokens of a random model, whose logits lie close together
    assert abs(close.loss - close.reference_loss) < 0.03
    assert far.kl > 0.1
    assert not far.met
    assert far.reference_loss == close.reference_loss


def test_losses_are_those_of_the_raw_logits() -> None:
    """Chunks or not, a text's loss is what its own logits say."""
    passes, text = passes_on(Reference), TEXTS[0][1]
    rows = np.concatenate(list(fidelity.logits_of(passes, text))).astype(np.float64)
    assert len(rows) == len(text) - 1 > fidelity.CHUNK
    shares = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    expected = -np.log(shares[np.arange(len(rows)), text[1:]]).mean()
    with Fidelity(TEXTS[:1]) as held:
        held.record(passes)
        report = held.compare(passes)
    assert report.loss == pytest.approx(expected)


def test_figures_that_are_no_numbers_meet_nothing() -> None:
    case = fidelity.FidelityCase("nan", tokens=1, divergence=float("nan"))
    report = FidelityReport([case])
    assert not report.met
    assert report.summary()["kl"] is None


def test_progress_reaches_its_end() -> None:
    ticks: list[tuple[int, int]] = []
    passes = passes_on(Reference)
    with Fidelity(TEXTS) as held:
        held.record(passes, lambda *now: ticks.append(now))
        held.compare(passes, lambda *now: ticks.append(now))
    assert ticks == [(i + 1, 10) for i in range(10)]


def test_nothing_to_compare() -> None:
    with pytest.raises(InvalidPrompt, match="two tokens"):
        Fidelity([("short", [1])])
    with Fidelity(TEXTS) as held:
        with pytest.raises(InvalidParams, match="recorded"):
            held.compare(passes_on(Reference))
        held.record(passes_on(Reference))
        with pytest.raises(InvalidParams, match="vocabularies"):
            held.compare(passes_on(Reference, vocab_size=101))
    with pytest.raises(InvalidPrompt, match="context holds 512"):
        list(fidelity.logits_of(passes_on(Reference), [1] * 600))


def test_texts(tmp_path: Path) -> None:
    file = tmp_path / "gsm.jsonl"
    rows = [{"question": f"How many? {i}", "answer": f"#### {i}"} for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    assert [text.text for text in fidelity.texts_of(file, 2)] == [
        "How many? 0\n#### 0",
        "How many? 3\n#### 3",
    ]
    plain = tmp_path / "plain.txt"
    plain.write_text("One.\nTwo.\n")
    assert [text.text for text in fidelity.texts_of(plain)] == ["One.", "Two."]
    assert len(fidelity.texts_of(None, 12)) == 12
    with pytest.raises(InvalidParams, match="limit"):
        fidelity.texts_of(None, 0)


def test_the_command(shell: Shell, tmp_path: Path) -> None:
    ran = shell("bench", "fidelity", "--limit", "2", "--out", str(tmp_path / "out.json"))
    assert ran.code == 0
    values = json.loads(ran.last)
    assert values["kind"] == "fidelity"
    assert values["summary"]["kl"] == 0
    assert values["summary"]["same"] == 1
    assert len(values["samples"]) == 2
    assert "mean KL" in ran.out
    alone = shell("bench", "fidelity", "--limit", "1", "--json")
    assert len(alone.out.splitlines()) == 1
