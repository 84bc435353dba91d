"""Diffusion models: logits of their published code, and bits that ignore company.

Golden logits were made once by `golden/make.py`; see there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from outstride import LLM, SamplingParams
from outstride.core.contracts import CAUSAL, FULL, AttentionPattern, MaskedSpec
from outstride.core.graph import FloatArray, TokenGraph, block, chain, empty
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.checkpoint import read_config, stored_model
from outstride.models.config import DecoderConfig
from outstride.models.decoder import Decoder
from outstride.models.load import load as load_in
from outstride.ops.cpu import native
from outstride.ops.cuda import available
from tests.models.drive import Hand, load, logits
from tests.models.published import BLOCK, CONFIGS, LENGTH, MASK, canvas, prompts, rows, save, text

GOLDEN = Path(__file__).parent / "golden"
HALF = LENGTH // 2
BLOCKS = ("llada2_moe", "sdar", "Fast_dLLM_Qwen")
BOTH = ("sdar", "Fast_dLLM_Qwen")
DENSE = ("llada", "Dream", *BOTH)
MASKING = {
    "llada": MaskedSpec(MASK, None, shifted=False, causal=False),
    "lladamoe": MaskedSpec(MASK, None, shifted=False, causal=False),
    "llada2_moe": MaskedSpec(MASK, BLOCK, shifted=False, causal=False),
    "Dream": MaskedSpec(MASK, None, shifted=True, causal=False),
    "sdar": MaskedSpec(MASK, BLOCK, shifted=False, causal=True),
    "Fast_dLLM_Qwen": MaskedSpec(MASK, BLOCK, shifted=True, causal=True),
}


def blocks(tokens: list[int], start: int, size: int) -> TokenGraph:
    """Blocks of tokens, each of which sees itself and those before it."""
    graph = empty()
    for i in range(0, len(tokens), size):
        part = block(tokens[i : i + size], start + i)
        graph = graph.grow(part) if len(graph) else part
    return graph


def read(hand: Hand, tokens: list[int], size: int, chunk: int) -> FloatArray:
    """Reads tokens in blocks, `chunk` tokens at a time, and keeps them."""
    found = []
    for i in range(0, len(tokens), chunk):
        graph = blocks(tokens[i : i + chunk], len(hand.positions), size)
        found.append(logits(hand.run(graph)))
        hand.keep(graph, range(len(graph)))
    return np.concatenate(found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save(family, tmp_path_factory.mktemp("published")) for family in CONFIGS}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Decoder]:
    return {family: load(str(folder), pages=64).model for family, folder in folders.items()}


def close(ours: FloatArray, family: str, case: str) -> None:
    theirs = np.load(GOLDEN / f"{family}.npz")[case]
    np.testing.assert_allclose(ours[rows(len(ours))], theirs, rtol=1e-4, atol=1e-4)


def size_of(model: Decoder) -> int:
    """Tokens that see each other."""
    assert model.masked_spec is not None
    return model.masked_spec.block or LENGTH


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_of_the_published_code(models: dict[str, Decoder], family: str) -> None:
    model = models[family]
    size = size_of(model)
    for case, tokens in (("text", text(family)), ("canvas", canvas(family))):
        close(logits(Hand(model, [5, 2, 9]).run(blocks(tokens, 0, size))), family, case)


@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_behind_a_cache(models: dict[str, Decoder], family: str) -> None:
    model = models[family]
    for chunk in (BLOCK, 3 * BLOCK, LENGTH):
        close(read(Hand(model, [7, 3, 1]), text(family), BLOCK, chunk), family, "text")
        hand = Hand(model, [4, 8, 6])
        read(hand, text(family)[:HALF], BLOCK, min(chunk, HALF))
        masked = block(canvas(family)[HALF : HALF + BLOCK], HALF)
        close(logits(hand.run(masked)), family, "block")


@pytest.mark.parametrize("family", BOTH)
def test_causal_requests_share_a_pass_with_masked_blocks(
    models: dict[str, Decoder], family: str
) -> None:
    """The graph decides who sees whom, not the model."""
    model = models[family]
    one, two = Hand(model, [0, 1, 2]), Hand(model, [3, 4, 5])
    read(two, text(family)[:HALF], BLOCK, HALF)
    masked = block(canvas(family)[HALF : HALF + BLOCK], HALF)
    works = [one.work(chain(text(family))), two.work(masked)]
    both = [logits(scores) for scores in model.forward(works).wait()]
    close(both[0], family, "causal")
    close(both[1], family, "block")
    assert np.array_equal(both[0], Hand(model, [6, 7, 8]).read(text(family), 7))
    assert np.array_equal(both[1], logits(two.run(masked)))


@pytest.mark.parametrize("family", CONFIGS)
def test_conventions(models: dict[str, Decoder], family: str) -> None:
    model = models[family]
    assert model.masked_spec == MASKING[family]
    assert model.attention_pattern == (AttentionPattern(BLOCK) if family in BLOCKS else FULL)
    assert model.vocab_size == CONFIGS[family].get("embedding_size", CONFIGS[family]["vocab_size"])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_row_ignores_its_batch(models: dict[str, Decoder], family: str) -> None:
    """A node alone and among 63 others, of its own sequence and of others, in any packing."""
    model = models[family]
    size = size_of(model)
    alone = logits(Hand(model, [0]).run(chain([9])))
    batch = [Hand(model, [i + 1]).work(chain([9 if i == 40 else i % 60])) for i in range(63)]
    together = model.forward([*batch[:40], Hand(model, [0]).work(chain([9])), *batch[40:]]).wait()
    assert np.array_equal(logits(together[40]), alone)
    assert np.array_equal(logits(together[41]), alone)
    whole = logits(Hand(model, [11, 12, 13]).run(blocks(canvas(family), 0, size)))
    works = [Hand(model, [i, i + 1, i + 2]).work(chain(text("x")[: 17 + i])) for i in (20, 30, 40)]
    works.insert(1, Hand(model, [13, 11, 12]).work(blocks(canvas(family), 0, size)))
    assert np.array_equal(logits(model.forward(works).wait()[1]), whole)


@pytest.mark.parametrize("family", BLOCKS)
def test_cached_blocks_have_the_bits_of_blocks_in_the_same_pass(
    models: dict[str, Decoder], family: str
) -> None:
    model = models[family]
    whole = logits(Hand(model, [1, 2, 3]).run(blocks(text(family), 0, BLOCK)))
    for chunk in (BLOCK, 5 * BLOCK):
        assert np.array_equal(read(Hand(model, [9, 4, 6]), text(family), BLOCK, chunk), whole)


def routed(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def change(config: DecoderConfig) -> DecoderConfig:
        assert config.experts is not None
        routing = replace(config.experts.routing, **changes)
        return replace(config, experts=replace(config.experts, routing=routing))

    return change


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("llada", lambda config: replace(config, rope=replace(config.rope, theta=501.0))),
        ("llada", lambda config: replace(config, norm_eps=1e-3)),
        ("llada2_moe", lambda config: replace(config, rotary=None)),
        ("llada2_moe", routed(groups=1, groups_kept=1)),
        ("llada2_moe", routed(normalized=False)),
        ("llada2_moe", routed(biased=True)),
        ("lladamoe", routed(biased=False)),
        ("lladamoe", routed(normalized=True)),
    ],
)
def test_golden_logits_notice_faults(
    folders: dict[str, Path], family: str, fault: Callable[[DecoderConfig], DecoderConfig]
) -> None:
    config = read_config(folders[family])
    tensors = stored_model(folders[family], config).read()
    model = Decoder.from_tensors(fault(config), tensors, pages=4)
    size = BLOCK if family in BLOCKS else LENGTH
    found = logits(Hand(model, [0, 1, 2]).run(blocks(text(family), 0, size)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        close(found, family, "text")


@pytest.mark.parametrize("family", CONFIGS)
def test_texts_of_the_published_code(folders: dict[str, Path], family: str) -> None:
    """Greedy, one token per pass: what each model's own code writes, here in one batch."""
    asked = prompts(family)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for _, count in asked]
    size = 0 if family in BLOCKS or family == "Dream" else BLOCK
    with LLM(str(folders[family]), weights="fp32") as llm:
        found = llm.generate(
            [ids for ids, _ in asked], params, method=f"steps:order=confidence,block={size}"
        )
    answers = json.loads((GOLDEN / "answers.json").read_text())
    assert [result.token_ids for result in found] == answers[family]


@pytest.mark.parametrize("family", BOTH)
def test_autoregressive_and_masked_requests_in_one_batch(
    folders: dict[str, Path], family: str
) -> None:
    asked = [ids for ids, _ in prompts(family)] * 2
    params = [
        SamplingParams(max_tokens=10, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
        for i in range(6)
    ]
    methods = ["plain", "steps", "ngram", "steps:count=2", "plain", "steps"]
    with LLM(str(folders[family]), weights="fp32") as llm:
        mixed = [result.token_ids for result in llm.generate(asked, params, method=methods)]
        methods[2] = "plain"
        for ids, one, method, found in zip(asked, params, methods, mixed, strict=True):
            assert llm.generate([ids], one, method=method)[0].token_ids == found


# --- native kernels -------------------------------------------------------------------------------


@pytest.mark.skipif(native.library_path() is None, reason="no native kernels were built")
@pytest.mark.parametrize("family", DENSE)
def test_native_kernels(
    folders: dict[str, Path], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path))
    for _ in range(2):  # converted, and then read back
        model = load_in(str(folders[family]), pages=64, weights="int8").model
        assert model.ops.name.startswith("cpu")
        assert model.masked_spec == MASKING[family]
        near_and_by_itself(model, family)


@pytest.mark.skipif(not available(), reason="no GPU")
@pytest.mark.parametrize("family", DENSE)
def test_gpu(folders: dict[str, Path], family: str) -> None:
    model = load_in(str(folders[family]), pages=64, weights="bf16").model
    assert model.masked_spec == MASKING[family]
    near_and_by_itself(model, family)


def near_and_by_itself(model: Decoder, family: str) -> None:
    """Masked blocks and canvases in a coarser format: near the golden logits, whatever the company."""
    size = size_of(model)
    for case, tokens in (("text", text(family)), ("canvas", canvas(family))):
        graph = blocks(tokens, 0, size)
        found = logits(Hand(model, [5, 2, 9]).run(graph))
        theirs = np.load(GOLDEN / f"{family}.npz")[case]
        assert np.abs(found[rows(len(found))] - theirs).mean() < 0.08 * theirs.std()
        works = [
            Hand(model, [20, 21, 22]).work(chain(text("x"))),
            Hand(model, [7, 3, 1]).work(graph),
        ]
        assert np.array_equal(logits(model.forward(works).wait()[1]), found)
    if family in BLOCKS:
        whole = logits(Hand(model, [5, 2, 9]).run(blocks(text(family), 0, BLOCK)))
        assert np.array_equal(read(Hand(model, [8, 4, 6]), text(family), BLOCK, 2 * BLOCK), whole)


def test_mixtures_take_the_native_kernels_by_themselves(folders: dict[str, Path]) -> None:
    model = load_in(str(folders["lladamoe"]), pages=4).model
    assert model.ops.weights == ("fp32" if native.library_path() is None else "int8")


# --- files that are not as they should be ---------------------------------------------------------


def changed(folder: Path, into: Path, drop: str | None = None, **config: Any) -> Path:
    """A copy of a checkpoint with a tensor or some of its config changed."""
    into.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    values = {**json.loads((folder / "config.json").read_text()), **config}
    kept = {key: value for key, value in values.items() if value != "absent"}
    (into / "config.json").write_text(json.dumps(kept))
    if drop is not None:
        tensors = safetensors.torch.load_file(into / "model.safetensors")
        if drop in tensors:
            del tensors[drop]
        else:
            tensors[drop] = torch.zeros(2)
        safetensors.torch.save_file(tensors, into / "model.safetensors")
    return into


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llada", "model.transformer.blocks.1.up_proj.weight"),
        ("llada2_moe", "model.layers.1.attention.query_key_value.weight"),
        ("lladamoe", "model.layers.2.mlp.experts.7.up_proj.weight"),
    ],
)
def test_missing_tensors_are_named_as_in_the_file(
    folders: dict[str, Path], tmp_path: Path, family: str, tensor: str
) -> None:
    with pytest.raises(CorruptModel, match=f"{tensor!r} is missing"):
        load(str(changed(folders[family], tmp_path, drop=tensor)))
    extra = "model.layers.1.mlp.experts.8.up_proj.weight"
    with pytest.raises(CorruptModel, match=f"{extra!r}.*not part of"):
        load(str(changed(folders[family], tmp_path, drop=extra)))


def test_the_mask_comes_from_config_or_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["sdar"], tmp_path, mask_token_id="absent")
    with pytest.raises(UnsupportedModel, match=r"mask_token_id in config\.json"):
        load(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "w33"}))
    masking = load(str(folder), pages=4).model.masked_spec
    assert masking is not None
    assert masking.token == 33
    with pytest.raises(CorruptModel, match="mask token 99"):
        load(str(changed(folders["sdar"], tmp_path, mask_token_id=99)))


def test_block_lengths(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load(str(changed(folders["sdar"], tmp_path, block_size=16)), pages=4).model
    assert model.attention_pattern == AttentionPattern(16)
    model = load(str(changed(folders["Fast_dLLM_Qwen"], tmp_path, bd_size="absent")), pages=4).model
    assert model.attention_pattern == AttentionPattern(32)
    with pytest.raises(CorruptModel, match="blocks of 0"):
        load(str(changed(folders["sdar"], tmp_path, block_size=0)))


@pytest.mark.parametrize(
    "switch", [{"block_type": "sequential"}, {"include_bias": True}, {"rope": "absent"}]
)
def test_other_shapes_of_llada(
    folders: dict[str, Path], tmp_path: Path, switch: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModel, match=f"LLaDA with {next(iter(switch))}"):
        load(str(changed(folders["llada"], tmp_path, **switch)))


def test_weight_tying_of_llada(folders: dict[str, Path], tmp_path: Path) -> None:
    head = "model.transformer.ff_out.weight"
    tied = load(str(changed(folders["llada"], tmp_path / "a", weight_tying=True)), pages=4).model
    bare = changed(folders["llada"], tmp_path / "b", drop=head, weight_tying=True)
    one, two = (
        Hand(model, [0, 1]).read([3, 4]) for model in (tied, load(str(bare), pages=4).model)
    )
    assert np.array_equal(one, two)


def test_autoregressive_models_have_no_masks(tmp_path: Path) -> None:
    from tests.models import checkpoints

    for variant in ("qwen3 moe", "olmoe"):
        folder = checkpoints.save(checkpoints.make(variant), tmp_path / variant)
        model = load(str(folder), pages=4).model
        assert model.masked_spec is None
        assert model.attention_pattern == CAUSAL
