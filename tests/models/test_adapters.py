"""LoRA adapters: other rows keep their bits, its own depend on no other row, text stays exact."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outstride import registry
from outstride.core.contracts import MaskedSpec
from outstride.core.graph import Mixture, NodeId, TokenGraph, block, chain
from outstride.core.params import SamplingParams
from outstride.engine.engine import Engine
from outstride.engine.scheduler import Limits
from outstride.errors import CorruptModel, OutstrideError, UnsupportedModel
from outstride.models.config import DecoderConfig
from outstride.models.decoder import Decoder
from outstride.models.diffusion import Diffusion
from outstride.models.draft_heads import attach
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens

RANK, BLOCK = 3, 8
OPS: dict[str, Callable[[ModelWeights], Ops]] = {"reference": Reference}
if native.library_path() is not None:
    for isa in native.isas():
        OPS[native.ISAS[isa]] = partial(Cpu.of, isa=isa, count=2)
    OPS["int4"] = partial(Cpu.of, bits=4)
CONFIGS = {
    "usual": tiny(),
    "norms and biases": tiny(head_norms=True, qkv_bias=True, output_bias=True, mlp_bias=True),
    "odd": tiny(heads=5, kv_heads=1, head_dim=24, hidden_size=40, windows=(70, None)),
}
PAGES = [27, 23, 40, 22, 25, 61, 33, 32]


def adapter_tensors(config: DecoderConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    """An adapter with random weights, large enough to change logits clearly."""
    source = torch.Generator().manual_seed(seed)
    size, inner = config.hidden_size, config.intermediate_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (size, wide),
        "self_attn.k_proj": (size, narrow),
        "self_attn.v_proj": (size, narrow),
        "self_attn.o_proj": (wide, size),
        "mlp.gate_proj": (size, inner),
        "mlp.up_proj": (size, inner),
        "mlp.down_proj": (inner, size),
    }
    found = {"mask.weight": torch.randn(1, size, generator=source)}
    for name, (columns, rows) in shapes.items():
        low = torch.randn(config.layers * RANK, columns, generator=source)
        found[f"{name}.low"] = low * columns**-0.5
        found[f"{name}.high"] = torch.randn(config.layers * RANK, rows, generator=source)
    return found


def write_adapter(
    folder: Path, config: DecoderConfig, tensors: dict[str, torch.Tensor], **about: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = {key: getattr(config, key) for key in ("hidden_size", "layers", "vocab_size")}
    said = {"outstride": "diffusion-adapter", "rank": RANK, "block": BLOCK, "target": target}
    (folder / "config.json").write_text(json.dumps({**said, **about}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def adapted(model: Decoder, folder: Path) -> MaskedSpec:
    attach(model, "adapter", write_adapter(folder, model.config, adapter_tensors(model.config)))
    assert model.masked_spec is not None
    assert model.masked_spec.uses_adapter
    return model.masked_spec


def canvas(mask: int, start: int, seed: int) -> TokenGraph:
    """A block of masks and tokens."""
    inputs = [mask, *tokens(3, seed), mask, mask]
    return block(inputs, start)


def mixed(mask: int, start: int) -> TokenGraph:
    """Tokens as a tree, with blocks of masks below them and one with a mixture."""
    graph = chain(tokens(3, 1), start)
    graph = graph.grow(canvas(mask, start + 1, 2), at=NodeId(0))
    graph = graph.grow(chain(tokens(2, 3), start + 3), at=NodeId(2))
    soft = Mixture((4, mask), (0.3, 0.7))
    return graph.grow(block([soft, 7], start + 3), at=NodeId(2))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ops", OPS)
def test_rows_outside_the_adapter_keep_their_bits(ops: str, config: str, tmp_path: Path) -> None:
    """Logits and KV of all nodes outside blocks with masks, with and without the adapter."""
    models = [random_decoder(CONFIGS[config], make_ops=OPS[ops]) for _ in range(2)]
    mask = adapted(models[1], tmp_path).token
    prompt, found = tokens(37), []
    for model in models:
        hand = Hand(model, PAGES)
        read = [hand.read(prompt, 16)]
        if model is models[1]:
            graph = mixed(mask, 37)
            scores = logits(hand.run(graph))
            outside = [0, 1, 2, 9, 10]
            read.append(scores[outside])
            hand.keep(graph, outside)
        else:
            graph = chain(tokens(3, 1), 37).grow(chain(tokens(2, 3), 40))
            read.append(logits(hand.run(graph)))
            hand.keep(graph, range(5))
        read.append(hand.read(tokens(9, 4)))
        found.append(read)
    for plain, other in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, other)


@pytest.mark.parametrize("ops", OPS)
def test_adapter_rows_do_not_depend_on_the_batch(ops: str, tmp_path: Path) -> None:
    """A block has the same bits alone and in a batch, and others than without the adapter."""
    model = random_decoder(CONFIGS["usual"], make_ops=OPS[ops])
    mask = adapted(model, tmp_path).token
    hands = [Hand(model, PAGES[i : i + 2]) for i in (0, 2, 4, 6)]
    for i, hand in enumerate(hands):
        hand.read(tokens(9 + 3 * i, i))
    graphs = [canvas(mask, 9, 8), chain(tokens(5), 12), mixed(mask, 15), canvas(mask, 18, 3)]
    alone = [logits(hand.run(graph)) for hand, graph in zip(hands, graphs, strict=True)]
    work = [hand.work(graph) for hand, graph in zip(hands, graphs, strict=True)]
    for one, other in zip(alone, model.forward(work[::-1]).wait()[::-1], strict=True):
        np.testing.assert_array_equal(one, logits(other))
    assert model.masked_spec is not None
    model.masked_spec = None  # no row goes through the adapter
    assert np.abs(logits(hands[0].run(graphs[0])) - alone[0]).max() > 0.1
    np.testing.assert_array_equal(logits(hands[1].run(graphs[1])), alone[1])


def test_the_cpu_backend_agrees_with_the_reference(tmp_path: Path) -> None:
    """Up to the rounding of activations; an adapter in the wrong channels would be far off."""
    found = []
    for name in OPS:
        if name == "int4":
            continue
        model = random_decoder(tiny(qkv_bias=True), make_ops=OPS[name], rounded=True)
        mask = adapted(model, tmp_path / name).token
        hand = Hand(model, PAGES)
        hand.read(tokens(20))
        found.append(logits(hand.run(canvas(mask, 20, 8))))
    spread = float(found[0].std())
    for other in found[1:]:
        assert np.abs(other - found[0]).max() < 0.4 * spread


SPECS = (
    "steps:count=3",
    "threshold:threshold=0.02",
    "factor:factor=2.9,block=4",
    "entropy-bound:bound=9",
    "pipeline:threshold=0.02",
    "refine:threshold=0.02,latent=1",
    "self-diffuse",
    "self-diffuse:length=7",
    "plain",
)


def decode(
    ops: str, folder: Path, requests: list[tuple[list[int], str, SamplingParams]], **limits: int
) -> list[list[int]]:
    model = random_decoder(tiny(), pages=limits["pages"], make_ops=OPS[ops])
    adapted(model, folder)
    engine = Engine({"target": model}, limits=Limits(nodes=limits["nodes"]))
    found = [engine.submit(p, params, registry.build(spec)) for p, spec, params in requests]
    while engine.busy:
        engine.step()
        engine.check_integrity()
    assert all(sequence.error is None for sequence in found), [s.error for s in found]
    return [sequence.output for sequence in found]


def test_texts_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Masked methods give the same text alone and in a batch; self-drafting gives plain text."""
    registry.discover()
    ops, rng = list(OPS)[-2 if "int4" in OPS else -1], random.Random(3)
    kinds = [
        SamplingParams(max_tokens=13, seed=3),
        SamplingParams(max_tokens=13, temperature=0.8, top_p=0.9, seed=5),
    ]
    requests = [
        ([rng.randrange(97) for _ in range(rng.randrange(1, 40))], spec, kinds[i % 2])
        for i, spec in enumerate(SPECS)
    ]
    expected = [decode(ops, tmp_path, [one], pages=40, nodes=256)[0] for one in requests]
    for pages, nodes in ((100, 512), (12, 40)):
        assert decode(ops, tmp_path, requests, pages=pages, nodes=nodes) == expected
    for prompt, _, params in requests:
        drafted = [(prompt, spec, params) for spec in ("plain", "self-diffuse", "steps")]
        plain, *others = decode(ops, tmp_path, drafted, pages=60, nodes=256)
        assert others == [plain, plain], "one step at a time, the next token is the model's own"


def test_adapters_that_cannot_be_attached(tmp_path: Path) -> None:
    model = random_decoder(tiny())
    tensors = adapter_tensors(model.config)
    wrong: list[tuple[dict[str, Any], dict[str, Any], type[OutstrideError], str]] = [
        ({"mlp.down_proj.low": tensors["mlp.up_proj.low"].clone()}, {}, CorruptModel, "down_proj"),
        ({}, {"rank": "many"}, CorruptModel, "damaged"),
        ({}, {"target": {"hidden_size": 96}}, UnsupportedModel, "hidden_size"),
    ]
    for other, about, error, words in wrong:
        folder = write_adapter(tmp_path, model.config, {**tensors, **other}, **about)
        with pytest.raises(error, match=words):
            attach(model, "adapter", folder)
    assert model.masked_spec is None
    adapted(model, tmp_path)
    with pytest.raises(UnsupportedModel, match="already"):
        attach(model, "another", write_adapter(tmp_path, model.config, tensors))
    masked = random_decoder(tiny(diffusion=Diffusion(block=4)))
    masked.masked_spec = MaskedSpec(96, 4, shifted=False, causal=False)
    with pytest.raises(UnsupportedModel, match="by itself"):
        attach(masked, "adapter", write_adapter(tmp_path, masked.config, tensors))


def test_a_backend_without_adapters_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_decoder(tiny())
    monkeypatch.setattr(model.ops.draft_heads, "unsupported_adapter", lambda: "use another one")
    with pytest.raises(UnsupportedModel, match=r"cannot run LoRA adapters: use another one"):
        adapted(model, tmp_path)
    assert model.masked_spec is None


def test_without_masks_no_row_goes_through_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pass of tokens alone."""
    model = random_decoder(tiny())
    adapted(model, tmp_path)

    assert isinstance(model.ops, Reference)
    spans: list[Any] = []
    begin = model.ops.begin

    def spy(*given: Any) -> Any:
        spans.extend(given[0])
        return begin(*given)

    monkeypatch.setattr(model.ops, "begin", spy)
    Hand(model, PAGES).read(tokens(20), 8)
    assert spans
    assert all(span.adapter_rows is None for span in spans)


def test_the_fingerprint_depends_on_the_adapter(tmp_path: Path) -> None:
    """Masked texts depend on the adapter, so the fingerprint must change with it."""
    names = set()
    for seed in (None, 5, 6):
        model = random_decoder(tiny(tied=True))
        if seed is not None:
            folder = tmp_path / str(seed)
            attach(
                model,
                "adapter",
                write_adapter(folder, model.config, adapter_tensors(model.config, seed)),
            )
        names.add(model.fingerprint)
    assert len(names) == 3
