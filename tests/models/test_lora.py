"""LoRA adapters of requests: equal to merged weights, to themselves in any batch, and to plain text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outstride import registry
from outstride.core.graph import tree
from outstride.core.params import SamplingParams
from outstride.core.prefix_key import fingerprint_of
from outstride.engine.engine import Engine
from outstride.engine.scheduler import Limits
from outstride.errors import (
    CorruptModel,
    ModelError,
    ModelNotFound,
    UnknownMethod,
    UnsupportedModel,
)
from outstride.models import lora
from outstride.models.config import DecoderConfig
from outstride.models.decoder import Decoder
from outstride.ops.switches import GELU_TANH, Switches
from tests.models.checkpoints import expected, make, save
from tests.models.drive import Hand, load, logits, random_decoder, tiny, tokens
from tests.models.lora_files import linear_shapes, merge, shapes_of, write_lora
from tests.models.test_adapters import OPS, adapted

registry.discover()
PAGES = [27, 23, 40, 22, 25, 61, 33, 32]


def attach(model: Decoder, name: str, folder: Path) -> None:
    found = lora.read(folder, model.config)
    model.attach_adapter(name, found.digest, found.layers)


def with_adapters(
    ops: str, folder: Path, config: DecoderConfig | None = None, pages: int = 64
) -> Decoder:
    """A random decoder with two adapters, of different matrices and ranks."""
    model = random_decoder(config or tiny(), make_ops=OPS[ops], pages=pages)
    shapes = linear_shapes(model.config)
    write_lora(folder / "a", shapes, rank=4, seed=1)
    write_lora(folder / "b", shapes, r".*\.(q|v|down)_proj", rank=7, seed=2)
    for name in "ab":
        attach(model, name, folder / name)
    return model


# --- against merged weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    ["llama", "llama biases", "qwen3", "phi3 partial", "glm4", "gemma3", "granite", "olmo2"],
)
def test_logits_of_the_merged_model(variant: str, tmp_path: Path) -> None:
    """In fp32, against transformers with the adapter merged by hand."""
    theirs = make(variant)
    model = load(str(save(theirs, tmp_path / "base")), pages=64).model
    factors = write_lora(tmp_path / "lora", shapes_of(theirs))
    attach(model, "x", tmp_path / "lora")
    prompt, before = tokens(40), expected(theirs, tokens(40))
    after = expected(merge(theirs, factors), prompt)
    assert (after - before).abs().max() > 0.1
    for adapter, reference in (("x", after), ("", before)):
        found = Hand(model, list(range(12)), adapter=adapter).read(prompt, 9)
        np.testing.assert_allclose(found, reference.numpy(), rtol=1e-4, atol=1e-4)


SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "alpha": ({"lora_alpha": 3}, 0.75),
    "rslora": ({"use_rslora": True}, 4.0),
    "list": ({"target_modules": ["q_proj", "down_proj"], "targets": r".*\.(q|down)_proj"}, 2.0),
    "all linear": ({"target_modules": "all-linear"}, 2.0),
    "one layer": (
        {
            "target_modules": ["v_proj"],
            "layers_to_transform": [1],
            "targets": r".*\.1\..*\.v_proj",
        },
        2.0,
    ),
    "bf16": ({"dtype": torch.bfloat16}, 2.0),
    "fp16": ({"dtype": torch.float16}, 2.0),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_peft(setting: str, tmp_path: Path) -> None:
    theirs = make("llama")
    model = load(str(save(theirs, tmp_path / "base")), pages=16).model
    about, scale = SETTINGS[setting]
    factors = write_lora(tmp_path / "lora", shapes_of(theirs), **about)
    attach(model, "x", tmp_path / "lora")
    prompt = tokens(20)
    reference = expected(merge(theirs, factors, scale), prompt).numpy()
    found = Hand(model, [0, 1], adapter="x").read(prompt)
    np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-4)


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    theirs = make("llama")
    model = load(str(save(theirs, tmp_path / "base")), pages=16).model
    shapes = shapes_of(theirs)
    ranks = {name: 6 for name in shapes if name.endswith("1.self_attn.q_proj")}
    alphas = {name: 1.5 for name in shapes if name.endswith(".up_proj")}
    factors = write_lora(
        tmp_path / "lora",
        shapes,
        ranks=ranks,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 6},
        alpha_pattern={"up_proj": 1.5},
    )
    attach(model, "x", tmp_path / "lora")
    scales = {name: alphas.get(name, 8.0) / ranks.get(name, 4) for name in shapes}
    prompt = tokens(20)
    reference = expected(merge(theirs, factors, scales), prompt).numpy()
    found = Hand(model, [0, 1], adapter="x").read(prompt)
    np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-4)


# --- in a batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", OPS)
def test_rows_do_not_depend_on_the_batch(ops: str, tmp_path: Path) -> None:
    """With each adapter and without: alone, in a batch, and in a model without adapters."""
    model = with_adapters(ops, tmp_path)
    names = ("", "a", "b", "a", "")
    hands = [Hand(model, PAGES[i : i + 1], adapter=name) for i, name in enumerate(names)]
    for i, hand in enumerate(hands):
        hand.read(tokens(3 + i, i))
    graphs = [tree(tokens(5, i), [-1, 0, 0, 1, 2], 3 + i) for i in range(len(hands))]
    alone = [logits(hand.run(graph)) for hand, graph in zip(hands, graphs, strict=True)]
    work = [hand.work(graph) for hand, graph in zip(hands, graphs, strict=True)]
    for one, other in zip(alone, model.forward(work[::-1]).wait()[::-1], strict=True):
        np.testing.assert_array_equal(one, logits(other))
    plain = Hand(random_decoder(tiny(), make_ops=OPS[ops]), PAGES[:1])
    plain.read(tokens(3, 0))
    np.testing.assert_array_equal(logits(plain.run(graphs[0])), alone[0])
    for name in "ab":
        with_it = Hand(model, PAGES[5:6], adapter=name)
        with_it.read(tokens(3, 0))
        assert np.abs(logits(with_it.run(graphs[0])) - alone[0]).max() > 0.1


@pytest.mark.parametrize("ops", OPS)
def test_long_batches_have_the_bits_of_short_ones(ops: str, tmp_path: Path) -> None:
    """More rows than threads prepare together, and adapters that take turns."""
    model = with_adapters(ops, tmp_path)
    prompt = tokens(60)
    for name in ("", "a", "b"):
        whole = Hand(model, PAGES[:4], adapter=name).read(prompt)
        np.testing.assert_array_equal(Hand(model, PAGES[4:], adapter=name).read(prompt, 1), whole)


LAYERS: dict[str, dict[str, Any]] = {
    "usual": {"qkv_bias": True},
    "as in Gemma": {"switches": Switches(activation=GELU_TANH, post_norms=True)},
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("ops", [name for name in OPS if name not in ("reference", "int4")])
def test_the_cpu_backend_agrees_with_the_reference(ops: str, layers: str, tmp_path: Path) -> None:
    """Up to the rounding of activations; an adapter in the wrong channels would be far off."""
    found = []
    for i, name in enumerate(("reference", ops)):
        model = random_decoder(tiny(**LAYERS[layers]), make_ops=OPS[name], rounded=True)
        write_lora(tmp_path / str(i), linear_shapes(model.config))
        attach(model, "x", tmp_path / str(i))
        found.append(Hand(model, PAGES[:2], adapter="x").read(tokens(20)))
    error = np.sqrt(np.square(found[1] - found[0]).mean()) / found[0].std()
    assert error < 0.1, "without an adapter it is 0.05 in the second kind of layers"


def test_the_diffusion_adapter_goes_with_the_others(tmp_path: Path) -> None:
    """It has a number among them: neither its rows nor those of requests change."""
    model = with_adapters("reference", tmp_path)
    before = [Hand(model, PAGES[:2], adapter=name).read(tokens(20)) for name in ("", "a", "b")]
    adapted(model, tmp_path / "masks")
    for name, expected_logits in zip(("", "a", "b"), before, strict=True):
        found = Hand(model, PAGES[:2], adapter=name).read(tokens(20))
        np.testing.assert_array_equal(found, expected_logits)


# --- in the engine ----------------------------------------------------------------------------------

Request = tuple[list[int], str, SamplingParams]


def decode(
    model: Decoder, requests: Sequence[Request], nodes: int = 256, shake: int = 0
) -> list[list[list[int]]]:
    """The texts of requests, all samples of each; `shake`: how often one loses all its pages."""
    engine, steps = Engine({"target": model}, limits=Limits(nodes=nodes)), 0
    found = [engine.submit(p, params, registry.build(spec)) for p, spec, params in requests]
    while engine.busy:
        steps += 1
        if shake and steps % shake == 0 and engine.running:
            engine.preempt(engine.running[steps % len(engine.running)])
        engine.step()
        engine.check_integrity()
    errors = [member.error for sequence in found for member in sequence.group]
    assert not any(errors), errors
    return [[member.output for member in sequence.group] for sequence in found]


METHODS = (
    "plain",
    "ngram",
    "suffix",
    "recycle",
    "lookahead",
    "trigram",
    "early-exit",
    "mix",
    "auto",
)


@pytest.mark.parametrize("ops", ["reference", "int4" if "int4" in OPS else "reference"])
def test_texts_do_not_depend_on_method_or_batch(ops: str, tmp_path: Path) -> None:
    """Every exact method equals plain with the same adapter, alone, in batches and after preemption."""
    rng = random.Random(3)
    prompt = [rng.randrange(97) for _ in range(20)] * 2
    kinds = [
        SamplingParams(max_tokens=16, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=5, n=2, ignore_eos=True),
    ]
    requests: list[Request] = [
        (prompt, spec, replace(kind, adapter=name))
        for name in ("", "a", "b")
        for kind in kinds
        for spec in METHODS
    ]
    plain = {
        (name, kind.n): decode(
            with_adapters(ops, tmp_path), [(prompt, "plain", replace(kind, adapter=name))]
        )[0]
        for name in ("", "a", "b")
        for kind in kinds
    }
    assert len({str(text) for text in plain.values()}) == len(plain), "adapters change the text"
    due = [plain[params.adapter, params.n] for _, _, params in requests]
    assert decode(with_adapters(ops, tmp_path, pages=400), requests, nodes=512) == due
    assert decode(with_adapters(ops, tmp_path, pages=60), requests, nodes=64, shake=3) == due


def test_masked_methods_with_an_adapter_are_refused(tmp_path: Path) -> None:
    model = with_adapters("reference", tmp_path)
    adapted(model, tmp_path / "masks")
    params = SamplingParams(max_tokens=9, adapter="a")
    with pytest.raises(UnknownMethod, match="without adapter 'a'"):
        decode(model, [([1, 2, 3], "steps", params)])
    texts = decode(model, [([1, 2, 3], spec, params) for spec in ("plain", "self-diffuse")])
    assert texts[0] == texts[1], "drafts of the diffusion adapter do not change the text"


# --- the fingerprint, names and numbers -------------------------------------------------------------


def test_the_fingerprint_contains_the_digest(tmp_path: Path) -> None:
    model = with_adapters("reference", tmp_path)
    base = random_decoder(tiny()).fingerprint
    assert model.fingerprint == fingerprint_of(model, "") == base
    assert len({base, fingerprint_of(model, "a"), fingerprint_of(model, "b")}) == 3
    write_lora(tmp_path / "c", linear_shapes(model.config), rank=4, seed=1)
    attach(model, "same as a", tmp_path / "c")
    assert fingerprint_of(model, "same as a") == fingerprint_of(model, "a")


@pytest.mark.parametrize("ops", ["reference", *[name for name in OPS if name != "reference"][-1:]])
def test_adapters_come_and_go(ops: str, tmp_path: Path) -> None:
    model = with_adapters(ops, tmp_path)
    before = Hand(model, PAGES[:2], adapter="b").read(tokens(20))
    with pytest.raises(UnsupportedModel, match="an adapter 'b' already"):
        attach(model, "b", tmp_path / "a")
    model.detach_adapter("a")
    assert list(model.adapters) == ["b"]
    np.testing.assert_array_equal(Hand(model, PAGES[:2], adapter="b").read(tokens(20)), before)
    attach(model, "again", tmp_path / "b")
    np.testing.assert_array_equal(Hand(model, PAGES[:2], adapter="again").read(tokens(20)), before)


# --- what is refused --------------------------------------------------------------------------------

LAYER = "base_model.model.model.layers.0."
REFUSED: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "dora": ({"use_dora": True}, UnsupportedModel, "DoRA"),
    "whole modules": (
        {"modules_to_save": ["lm_head"]},
        UnsupportedModel,
        "modules_to_save: lm_head",
    ),
    "biases": ({"bias": "all"}, UnsupportedModel, "bias: all"),
    "type": ({"peft_type": "IA3"}, UnsupportedModel, "type IA3"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, UnsupportedModel, "changed base model"),
    "no rank": ({"r": None}, CorruptModel, "damaged"),
    "pattern": ({"rank_pattern": {"(": 3}}, CorruptModel, "rank_pattern"),
    "lm head": (
        {"tensors": {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}},
        UnsupportedModel,
        "the LM head",
    ),
    "embedding": (
        {"tensors": {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)}},
        UnsupportedModel,
        "embeddings",
    ),
    "magnitudes": (
        {"tensors": {f"{LAYER}mlp.up_proj.lora_magnitude_vector": torch.zeros(80)}},
        UnsupportedModel,
        "DoRA",
    ),
    "other layers": (
        {
            "tensors": {
                "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 48)
            }
        },
        UnsupportedModel,
        r"layers\.7.*which this model does not have.*the/base",
    ),
    "rank": ({"rank_pattern": {"up_proj": 5}}, UnsupportedModel, r"\(5, 48\).*the/base"),
    "shape": (
        {"tensors": {f"{LAYER}mlp.up_proj.lora_B.weight": torch.zeros(64, 4)}},
        UnsupportedModel,
        r"mlp.up_proj.lora_B.weight.*\(80, 4\)",
    ),
    "half a pair": (
        {"tensors": {f"{LAYER}mlp.up_proj.lora_B.weight": None}},
        CorruptModel,
        "mlp.up_proj.lora_B.weight' is missing",
    ),
    "targets without factors": (
        {"targets": r".*\.q_proj", "target_modules": ["q_proj", "v_proj"]},
        CorruptModel,
        "v_proj.lora_A.weight' is missing",
    ),
    "no factor": (
        {"tensors": {"something.weight": torch.zeros(3)}},
        UnsupportedModel,
        "not a LoRA factor",
    ),
    "integers": (
        {"tensors": {f"{LAYER}mlp.up_proj.lora_B.weight": torch.zeros(80, 4, dtype=torch.int8)}},
        UnsupportedModel,
        "int8",
    ),
    "nan": (
        {"tensors": {f"{LAYER}mlp.up_proj.lora_B.weight": torch.full((80, 4), torch.nan)}},
        CorruptModel,
        "NaN",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_with_the_reason(case: str, tmp_path: Path) -> None:
    about, error, words = REFUSED[case]
    config = tiny()
    write_lora(tmp_path, linear_shapes(config), **about)
    with pytest.raises(error, match=words):
        lora.read(tmp_path, config)


def test_damaged_folders(tmp_path: Path) -> None:
    config = tiny()
    with pytest.raises(ModelNotFound, match=r"no adapter_config\.json"):
        lora.read(tmp_path, config)
    write_lora(tmp_path, linear_shapes(config))
    file = tmp_path / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptModel, match="cut off"):
        lora.read(tmp_path, config)
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CorruptModel, match=r"save adapter_model\.bin as safetensors"):
        lora.read(tmp_path, config)


def test_experts_are_refused(tmp_path: Path) -> None:
    theirs = make("qwen3 moe")
    model = load(str(save(theirs, tmp_path / "base")), pages=16).model
    write_lora(tmp_path / "a", linear_shapes(model.config), r".*experts\.0\.up_proj")
    with pytest.raises(UnsupportedModel, match="dense layers"):
        attach(model, "x", tmp_path / "a")
    factors = write_lora(tmp_path / "b", shapes_of(theirs), r".*self_attn\.\w_proj")
    attach(model, "x", tmp_path / "b")
    prompt = tokens(20)
    reference = expected(merge(theirs, factors), prompt).numpy()
    found = Hand(model, [0, 1], adapter="x").read(prompt)
    np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-4)
