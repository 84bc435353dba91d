"""The recipe of the shipped models: lessons, a few steps, and a checkpoint that loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.models.checkpoint import stored_model
from outstride.models.config import DecoderConfig
from outstride.models.shipped.lists import END, MASK, TASKS, cases
from outstride.train import loop, parallel
from outstride.train.list_tasks import IDS, TaskTexts, masked_examples
from outstride.train.parallel import BLOCK, CONFIGS, LENGTHS, forward, save

KINDS = ("full", "block")


def texts(kind: str) -> TaskTexts:
    pairs = [(c.prompt, c.answer) for name in TASKS for c in cases(name, 20)]
    return TaskTexts.of(pairs, LENGTHS[kind])


def test_texts_hold_question_answer_and_end() -> None:
    [case] = cases("copy", 1)
    found = TaskTexts.of([(case.prompt, case.answer)], 40)
    words = [*case.prompt.split(), *case.answer.split()]
    assert found.tokens[0].tolist() == [IDS[w] for w in words] + [IDS[END]] * (40 - len(words))
    assert found.starts.tolist() == [len(case.prompt.split())]
    assert found.stops.tolist() == [len(words) + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_examples_mask_answers_only_and_hide_what_is_not_seen(kind: str) -> None:
    given, block = texts(kind), BLOCK if kind == "block" else None
    numbers = torch.Generator().manual_seed(1)
    found = masked_examples(given, block, numbers, blank=False)
    places = torch.arange(LENGTHS[kind])
    masked = found.tokens == IDS[MASK]
    answers = places >= given.starts[:, None]
    assert masked.any(1).float().mean() > 0.5
    assert not (masked & ~answers).any()
    assert torch.equal(found.tokens[~masked], given.tokens.long()[~masked])
    causal = ~(found.mask & (places[None] > places[:, None])[None]).any((1, 2))
    assert causal.any() == (kind == "block")
    assert torch.equal(found.counted[~causal], masked[~causal])
    assert torch.equal(found.targets[~causal], given.tokens.long()[~causal])
    for row in causal.nonzero().flatten().tolist():
        # A causal text is scored where it stands: each token says what comes next.
        start, stop = int(given.starts[row]), int(given.stops[row])
        asked = found.counted[row].nonzero().flatten().tolist()
        assert asked == list(range(start - 1, stop - 1))
        assert found.targets[row, asked].tolist() == given.tokens[row, start:stop].tolist()
    if block is not None:
        later = places[None] // block > places[:, None] // block
        assert not (found.mask & later).any()
        blocks = [set((row.nonzero().flatten() // block).tolist()) for row in masked]
        assert max(map(len, blocks)) == 1


def test_training_is_a_function_of_the_seed_and_lowers_the_loss() -> None:
    said: list[str] = []

    def trained(steps: int, seed: int) -> dict[str, torch.Tensor]:
        weights, made = parallel.train(
            "block", steps=steps, batch=8, pool=400, seed=seed, say=said.append
        )
        assert made == steps
        return weights

    one, again, other = trained(2, 1), trained(2, 1), trained(2, 2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    trained(20, 1)
    assert "step 20 of 20" in said[-1]
    assert "s left" in said[-1]
    assert float(said[-1].split("loss ")[1].split(",")[0]) < 3.8  # untrained, it is 4.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_scores_as_the_recipe_does(kind: str, tmp_path: Path) -> None:
    """The recipe has its own forward pass; the decoder's must be the same function."""
    config = DecoderConfig.from_hf(CONFIGS[kind])
    weights = {name: 4 * value for name, value in parallel.fresh(config, 1).items()}
    save(kind, weights, tmp_path, "test")
    tensors = stored_model(tmp_path, config).read()
    with LLM(tmp_path, weights="fp32") as llm:
        for case in (cases("sort", 1)[0], cases("sentence", 1)[0]):
            text = f"{case.prompt} {case.answer}"
            prompt = [IDS[word] for word in text.split()]
            assert llm.encode(text) == prompt
            params = SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True)
            [answer] = llm.generate(text, params)
            assert answer.logprobs is not None
            size = len(prompt) + 1 if kind == "full" else (len(prompt) // BLOCK + 1) * BLOCK
            tokens = torch.tensor([prompt + [IDS[MASK]] * (size - len(prompt))])
            places = torch.arange(size)
            sees = places[None] // BLOCK <= places[:, None] // BLOCK
            sees = sees if kind == "block" else torch.ones_like(sees)
            row = forward(config, tensors, tokens, sees[None])[0, len(prompt)]
            rows = [row.log_softmax(-1)[answer.token_ids[0]].item()]
            found = [answer.logprobs[0].logprob]
            if kind == "block":
                [plain] = llm.generate(text, params, method="plain")
                assert plain.logprobs is not None
                row = forward(config, tensors, tokens, (places[None] <= places[:, None])[None])[0]
                row = row[len(prompt) - 1]
                assert plain.token_ids == [int(row.argmax())]
                rows.append(row.log_softmax(-1).max().item())
                found.append(plain.logprobs[0].logprob)
            assert found == pytest.approx(rows, abs=1e-3)


def test_steps_can_be_chosen_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding out how long a step takes teaches nothing."""
    said: list[str] = []
    monkeypatch.setattr(loop, "_REHEARSED", (1, 1))
    monkeypatch.setattr(
        parallel, "seconds_per_step", lambda step: loop.seconds_per_step(step) * 0 + 0.5
    )
    options = {"batch": 8, "pool": 40, "say": said.append}
    timed, steps = parallel.train("full", steps=0, seconds=1.6, **options)  # type: ignore[arg-type]
    assert steps == 3
    assert "full: 3 steps" in said
    counted, _ = parallel.train("full", steps=3, **options)  # type: ignore[arg-type]
    assert all(torch.equal(timed[name], counted[name]) for name in timed)


def test_rates_rise_and_fall() -> None:
    rates = [loop.rate_at(step, 100, 1.0) for step in range(100)]
    assert max(rates) == rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "2", "--batch", "8", "--pool", "40", "--workers", "2", "--check", "3"]
    assert parallel.main(["full", "--out", str(tmp_path / "m"), *options]) == 0
    assert "shuffle all at once" in capsys.readouterr().out
    assert {f.name for f in (tmp_path / "m").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
