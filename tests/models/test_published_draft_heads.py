"""Published drafters: candidates against oracles that follow the published code, and folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outstride import SamplingParams, registry
from outstride.core.draft_heads import BlockDraftHead, MedusaDraftHead, head_of_kind
from outstride.core.graph import block, chain, tree
from outstride.core.proposal import Scores, Wants
from outstride.engine.engine import Engine
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import DecoderConfig
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import attach
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.cuda.draft_head_ops import unsupported_draft_head
from outstride.ops.reference import Reference
from outstride.ops.weights import DraftHeadWeights, ModelWeights
from tests.models import published_drafters as published
from tests.models.drive import Hand, random_decoder, tiny, tokens
from tests.models.published_drafters import Random, Tensors, config_of, write
from tests.models.test_draft_heads import part_tensors, write_part

INNER, THETA, BLOCK = 72, 5000.0, 5

OPS: dict[str, Callable[[ModelWeights], Ops]] = {"reference": Reference}
if native.library_path() is not None:
    OPS["cpu"] = Cpu.of


def target() -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    """A model with an LM head of its own, and its weights as a random decoder has them."""
    config = tiny(layers=8)
    source, found = torch.Generator().manual_seed(0), {}
    for name, shape in config.shapes().items():
        values = torch.randn(shape, generator=source)
        if name.endswith("norm.weight"):
            found[name] = 1 + 0.1 * values
        else:
            values = values * (0.5 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
            step = values.abs().amax(dim=-1, keepdim=True) / 127
            found[name] = (values / step).round() * step if len(shape) == 2 else values
    return config, found


@pytest.fixture(params=sorted(OPS))
def model(request: pytest.FixtureRequest) -> Decoder:
    return random_decoder(tiny(layers=8), make_ops=OPS[request.param], rounded=True)


def prefill(
    model: Decoder, said: Sequence[int], aux_layers: tuple[int, ...]
) -> tuple[Hand, torch.Tensor]:
    """A prefilled sequence, and the hidden states that entered some layers, [tokens, A * hidden]."""
    hand, graph = Hand(model, list(range(20))), chain(list(said), 0)
    hidden = hand.run(graph, Wants(nodes=(), hidden=aux_layers)).hidden
    hand.keep(graph, range(len(said)))
    return hand, torch.from_numpy(np.concatenate([hidden[i] for i in aux_layers], axis=1))


def compare(model: Decoder, found: Scores, row: int, right: torch.Tensor, listed: Any) -> None:
    """One row of candidates against all logits [tokens] of an oracle for the listed tokens."""
    assert found.values is not None
    exact = model.ops.name.startswith("reference")
    places = np.searchsorted(listed, found.best[row])
    wanted = right.numpy()
    np.testing.assert_array_equal(listed[places], found.best[row])
    far = 3e-4 if exact else 0.5 * wanted.std()  # int8 rounds every product of every round
    np.testing.assert_allclose(found.values[row], wanted[places], atol=far)
    if exact:
        np.testing.assert_array_equal(found.best[row], listed[np.argsort(-wanted)[:16]])


# --- EAGLE ------------------------------------------------------------------------------------------


def first(folder: Path, *, pickled: bool = False) -> tuple[Path, published.Eagle, tuple[int, ...]]:
    """EAGLE as its authors publish it."""
    config, weights = target()
    random, size = Random(), config.hidden_size
    part = random.layer("layers.0.", config, INNER)
    part["fc.weight"], part["fc.bias"] = random.matrix(size, 2 * size), random.norm(size) - 1
    part["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    about = config_of(config, INNER, THETA, bias=True)
    write(folder, about, part, "pytorch_model.bin" if pickled else "")
    head, norm = weights["lm_head.weight"], weights["model.norm.weight"]
    oracle = published.EagleFirst(
        config, part, THETA, part["embed_tokens.weight"], lambda x: x @ head.T
    )
    oracle.features = lambda x: published.rms(x, norm, config.norm_eps)  # type: ignore[attr-defined]
    return folder, oracle, (config.layers,)


def third(
    folder: Path, *, speculators: bool = False, **switches: bool
) -> tuple[Path, published.Eagle, tuple[int, ...]]:
    """EAGLE-3 in the layout of its authors, or in the speculators format with its switches."""
    config, weights = target()
    random, size, at = Random(), config.hidden_size, "layers.0."
    part = random.layer(at, config, INNER, reads=2)
    part[f"{at}input_layernorm.weight"] = random.norm(size)
    part[f"{at}hidden_norm.weight"] = random.norm(size)
    part["norm.weight"], part["fc.weight"] = random.norm(size), random.matrix(size, 3 * size)
    listed = torch.arange(1, config.vocab_size, 3)
    part["d2t"] = listed - torch.arange(len(listed))
    part["t2d"] = torch.zeros(config.vocab_size).index_fill(0, listed, 1).bool()
    part["lm_head.weight"] = random.matrix(len(listed), size)
    embedding = weights["model.embed_tokens.weight"]
    if switches.get("norm_before_fc"):
        part["input_norm.weight"] = random.norm(3 * size)
    aux_layers = (2, 4, 5)
    if speculators:
        aux_layers = (1, 4, 6)
        part["embed_tokens.weight"] = embedding = random.matrix(*embedding.shape)
        about: dict[str, Any] = {"speculators_model_type": "eagle3", **switches}
        about |= {"draft_vocab_size": len(listed), "architectures": ["Eagle3Speculator"]}
        about |= {"eagle_aux_hidden_state_layer_ids": list(aux_layers)}
        about["transformer_layer_config"] = config_of(config, INNER, THETA)
        write(folder, about, part)
    else:
        named = {key.replace("layers.0.", "midlayer."): value for key, value in part.items()}
        write(folder, config_of(config, INNER, THETA, draft_vocab_size=len(listed)), named)

    def head(x: torch.Tensor) -> torch.Tensor:
        return published.rms(x, part["norm.weight"], config.norm_eps) @ part["lm_head.weight"].T

    oracle = published.EagleThird(config, part, THETA, embedding, head)
    oracle.early = switches.get("norm_before_residual", False)
    oracle.again = switches.get("norm_output", False)

    def features(x: torch.Tensor) -> torch.Tensor:
        if switches.get("norm_before_fc"):
            x = published.rms(x, part["input_norm.weight"], config.norm_eps)
        return x @ part["fc.weight"].T

    oracle.features = features  # type: ignore[attr-defined]
    return folder, oracle, aux_layers


def first_speculators(folder: Path) -> tuple[Path, published.Eagle, tuple[int, ...]]:
    """EAGLE in the speculators format: its tensors have other names there."""
    config, _ = target()
    folder, oracle, aux_layers = first(folder)
    names = {"layers.0.": "transformer.", "fc.": "fusion_fc."}
    part = {}
    for key, value in oracle.part.items():
        begin = next((b for b in names if key.startswith(b)), "")
        part[names.get(begin, "") + key.removeprefix(begin)] = value
    about = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True}
    write(folder, {**about, "transformer_layer_config": config_of(config, INNER, THETA)}, part)
    return folder, oracle, aux_layers


SWITCHES = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
EAGLES: dict[str, Callable[[Path], tuple[Path, Any, tuple[int, ...]]]] = {
    "eagle": first,
    "eagle pickled": lambda folder: first(folder, pickled=True),
    "eagle speculators": first_speculators,
    "eagle-3": third,
    "eagle-3 speculators": lambda folder: third(folder, speculators=True),
    "eagle-3 switches": lambda folder: third(folder, speculators=True, **SWITCHES),
}


def listed_of(oracle: published.Eagle) -> Any:
    far = oracle.part.get("d2t", torch.zeros(oracle.config.vocab_size, dtype=torch.long))
    return (far + torch.arange(len(far))).numpy()


@pytest.mark.parametrize("kind", EAGLES)
def test_eagle_drafts_what_the_published_code_drafts(
    model: Decoder, tmp_path: Path, kind: str
) -> None:
    """After a prefilled sequence, and after the branches of a tree that it drafted, round by round."""
    folder, oracle, aux_layers = EAGLES[kind](tmp_path)
    attach(model, "part", folder)
    assert model.draft_heads["part"].kind == "eagle"
    said, listed = tokens(21), listed_of(oracle)
    hand, hidden = prefill(model, said, aux_layers)
    features = oracle.features(hidden)
    graph = tree([7], [-1], len(said))
    asked: list[tuple[int, list[int]]] = [(0, [])]
    for level in range(3):
        first = len(graph) if level else 0
        if level:
            grown = [(2 * i + level, asked[0][1] if i == 0 else asked[-1][1]) for i in range(2)]
            parents = [*graph.parents.tolist(), asked[0][0], asked[-1][0]]
            fresh = [int(listed[5 + 3 * level]), int(listed[9 + level])]
            graph = tree([*graph.tokens.tolist(), *fresh], parents, len(said))
            asked = [
                (first + i, [*path, token])
                for i, ((_, path), token) in enumerate(zip(grown, fresh, strict=True))
            ]
        wants = Wants(nodes=tuple(node for node, _ in asked), best=16)
        scores = hand.run(graph, wants, draft_head="part", first=first)
        for row, (_, path) in enumerate(asked):
            right = oracle.said([*said, 7], features, path)
            compare(model, scores, row, right, listed)


@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_eagle_kv_follows_chunks_trees_and_moves(model: Decoder, tmp_path: Path, kind: str) -> None:
    folder, _, _ = EAGLES[kind](tmp_path)
    attach(model, "part", folder)
    said = tokens(21)
    whole, other = Hand(model, list(range(20))), Hand(model, list(range(20, 40)))
    whole.read(said)
    other.read(said[:17], chunk=5)
    branches = tree([said[17], 3, 4, said[18], said[19]], [-1, -1, 0, 0, 3], 17)
    other.run(branches)
    other.keep(branches, [0, 3, 4])
    wants = Wants(nodes=(0,), best=16)
    other.run(chain([9], 20), wants, draft_head="part")  # what it leaves ahead must not matter
    other.read(said[20:])
    one, two = (hand.run(chain([7], 21), wants, draft_head="part") for hand in (whole, other))
    np.testing.assert_array_equal(one.best, two.best)
    np.testing.assert_array_equal(one.values, two.values)


@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_eagle_drafts_in_the_engine(model: Decoder, tmp_path: Path, kind: str) -> None:
    """The text is plain decoding's; each round gets what the oracle gives for the same tokens."""
    folder, oracle, aux_layers = EAGLES[kind](tmp_path)
    attach(model, "part", folder)
    registry.discover()
    rounds: list[tuple[list[int], Scores]] = []
    forward = model.forward

    def recorded(work: Any) -> Any:
        pending = forward(work)
        if not work[0].proposal.draft_head:
            return pending
        scores = pending.wait()
        path = work[0].proposal.graph.path(int(scores[0].nodes[0]))
        rounds.append(([int(work[0].proposal.graph.tokens[n]) for n in path], scores[0]))
        return type("Over", (), {"wait": lambda self: scores, "start": lambda self: None})()

    answers = []
    for spec in ("plain", "eagle:from=part,depth=2,width=2,nodes=4"):
        model.forward = recorded  # type: ignore[method-assign]
        engine = Engine({"target": model})
        sequence = engine.submit(tokens(9), SamplingParams(max_tokens=8), registry.build(spec))
        while engine.busy:
            engine.step()
        answers.append(sequence.output)
    assert answers[0] == answers[1]
    model.forward = forward  # type: ignore[method-assign]
    text = [*tokens(9), *answers[0]]
    _, hidden = prefill(model, text, aux_layers)
    features, checked = oracle.features(hidden), 0
    for path, scores in rounds:
        for end in range(10, len(text)):
            if text[end - 1] != path[0]:
                continue
            right = oracle.said(text[:end], features[: end - 1], path[1:])
            listed = listed_of(oracle)
            places = np.searchsorted(listed, scores.best[0])
            assert scores.values is not None
            far = np.abs(scores.values[0] - right.numpy()[places]).max()
            checked += far < (3e-4 if model.ops.name.startswith("reference") else 0.7)
    assert len(rounds) >= 8
    assert checked >= len(rounds)


# --- DFlash -----------------------------------------------------------------------------------------


def block_part(layers: int, aux_layers: int, inner: int = INNER) -> Tensors:
    config, _ = target()
    random, size = Random(), config.hidden_size
    part: Tensors = {
        "fc.weight": random.matrix(size, aux_layers * size),
        "norm.weight": random.norm(size),
    }
    part["hidden_norm.weight"] = random.norm(size)
    for i in range(layers):
        part |= random.layer(f"layers.{i}.", config, inner, head_norms=True)
        part[f"layers.{i}.input_layernorm.weight"] = random.norm(size)
    return part


@pytest.mark.parametrize("kind", ["dflash", "dflash named", "dflash speculators"])
def test_dflash_drafts_what_the_published_code_drafts(
    model: Decoder, tmp_path: Path, kind: str
) -> None:
    config, weights = target()
    aux_layers = {"dflash": (2, 4, 6), "dflash named": (1, 3), "dflash speculators": (1, 6)}[kind]
    theta = config.rope.theta
    layers = 3 if kind == "dflash" else 2
    part = block_part(layers, len(aux_layers))
    about = config_of(config, INNER, theta, num_hidden_layers=layers, model_type="qwen3")
    listed, head = torch.arange(config.vocab_size), weights["lm_head.weight"]
    if kind == "dflash speculators":
        listed = torch.arange(0, config.vocab_size, 2)
        head = Random(9).matrix(len(listed), config.hidden_size)
        more = {"lm_head.weight": head, "d2t": listed - torch.arange(len(listed))}
        more["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        outer = {"speculators_model_type": "dflash", "block_size": BLOCK, "mask_token_id": 96}
        outer |= {"aux_hidden_state_layer_ids": list(aux_layers), "transformer_layer_config": about}
        write(tmp_path, outer, {**part, **more})
    else:
        own: dict[str, Any] = {"mask_token_id": 96}
        if kind == "dflash named":
            own["target_layer_ids"] = [layer - 1 for layer in aux_layers]
        about |= {"architectures": ["DFlashDraftModel"], "block_size": BLOCK}
        write(tmp_path, {**about, "dflash_config": own, "num_target_layers": 8}, part)
    attach(model, "part", tmp_path)
    found = head_of_kind(model.draft_heads["part"], BlockDraftHead)
    assert (found.kind, found.block, found.mask) == ("block-drafter", BLOCK, 96)
    hand, features = prefill(model, tokens(21), aux_layers)
    inputs = [7, *[96] * (BLOCK - 1)]
    embedded = weights["model.embed_tokens.weight"][inputs]
    right = published.dflash(config, part, theta, layers, features, embedded) @ head.T
    wants = Wants(nodes=tuple(range(1, BLOCK)), best=16)
    scores = hand.run(block(inputs, 21), wants, offset=0, draft_head="part")
    for row in range(BLOCK - 1):
        compare(model, scores, row, right[row + 1], listed.numpy())


# --- Medusa -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_drafts_what_the_published_code_drafts(
    model: Decoder, tmp_path: Path, file: str
) -> None:
    """Each head by itself: hidden state after the final norm, x + silu(linear(x)), LM head."""
    config, weights = target()
    random, size, heads = Random(), config.hidden_size, 3
    part: Tensors = {}
    for i in range(heads):
        part[f"{i}.0.linear.weight"] = random.matrix(size, size)
        part[f"{i}.0.linear.bias"] = random.norm(size) - 1
        part[f"{i}.1.weight"] = random.matrix(config.vocab_size, size)
    about = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    attach(model, "part", write(tmp_path, about, part, file))
    head = head_of_kind(model.draft_heads["part"], MedusaDraftHead)
    assert (head.kind, head.block, head.sequential) == ("heads", heads + 1, False)
    hand, hidden = prefill(model, tokens(21), (config.layers,))
    x = published.rms(hidden[-1], weights["model.norm.weight"], config.norm_eps)
    low, high = head.feature_range
    stored = model.feature(hand.table, 20)[low:high]
    np.testing.assert_allclose(stored, hidden[-1].numpy(), atol=1e-5)
    wants = Wants(nodes=tuple(range(heads)), best=16)
    given = np.repeat(stored[None], heads, axis=0)
    scores = hand.run(chain([7] * heads, 21), wants, draft_head="part", hidden=given)
    for i in range(heads):
        inner = part[f"{i}.0.linear.weight"] @ x + part[f"{i}.0.linear.bias"]
        right = part[f"{i}.1.weight"] @ (x + torch.nn.functional.silu(inner))
        compare(model, scores, i, right, np.arange(config.vocab_size))


# --- what does not fit ------------------------------------------------------------------------------


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config, _ = target()
    model = random_decoder(config, rounded=True)
    about = config_of(config, INNER, THETA)
    _, oracle, _ = first(tmp_path / "right")

    def refused(error: type[Exception], match: str, about: Any, part: Tensors) -> None:
        folder = write(tmp_path / match[:4].strip(), about, part)
        with pytest.raises(error, match=match):
            attach(model, "part", folder)

    refused(UnsupportedModel, "no known drafter", {"model_type": "bert"}, {"a": torch.ones(1)})
    refused(UnsupportedModel, "hidden_size 64", {**about, "hidden_size": 64}, oracle.part)
    refused(UnsupportedModel, "one layer", {**about, "num_hidden_layers": 2}, oracle.part)
    short = {key: value for key, value in oracle.part.items() if "down_proj" not in key}
    refused(CorruptModel, "down_proj.* missing", about, short)
    more = {**oracle.part, "layers.0.extra.weight": torch.ones(3)}
    refused(CorruptModel, "extra.weight", about, more)
    kind = {"speculators_model_type": "mlp", "transformer_layer_config": about}
    refused(UnsupportedModel, "'mlp'", kind, oracle.part)
    dflash = {**about, "dflash_config": {"target_layer_ids": [1]}, "block_size": 4}
    refused(CorruptModel, "mask_token_id", dflash, oracle.part)
    deep = {**about, "dflash_config": {"target_layer_ids": [7], "mask_token_id": 1}}
    refused(UnsupportedModel, "reads the hidden states", {**deep, "block_size": 4}, oracle.part)
    assert not model.draft_heads


@pytest.mark.skipif("cpu" not in OPS, reason="the native kernels are not built")
def test_the_cpu_backend_names_what_it_does_not_support(tmp_path: Path) -> None:
    config, _ = target()
    about = {"dflash_config": {"target_layer_ids": [1], "mask_token_id": 1}, "block_size": 4}
    for inner, theta, match in (
        (INNER, THETA, "RoPE frequencies"),
        (90, config.rope.theta, "90 wide"),
    ):
        part = block_part(1, 1, inner)
        folder = tmp_path / str(inner)
        write(folder, config_of(config, inner, theta, model_type="qwen3") | about, part)
        with pytest.raises(UnsupportedModel, match=f"{match}.*--weights fp32"):
            attach(random_decoder(config, make_ops=OPS["cpu"], rounded=True), "part", folder)
        model = random_decoder(config, rounded=True)
        attach(model, "part", folder)
        assert "part" in model.draft_heads


def test_the_cuda_backend_names_what_it_does_not_support(tmp_path: Path) -> None:
    """It runs draft heads of our own recipe; whatever differs from them has a reason of its own."""
    config, _ = target()
    model, held = random_decoder(config, rounded=True), list[DraftHeadWeights]()
    model.pack_draft_head = lambda weights: held.append(weights)  # type: ignore[method-assign]
    model.attach_draft_head = lambda *_: None  # type: ignore[method-assign]
    for i, make in enumerate(EAGLES.values()):
        attach(model, "part", make(tmp_path / str(i))[0])
    about = config_of(config, INNER, config.rope.theta, model_type="qwen3", block_size=4)
    about["dflash_config"] = {"target_layer_ids": [1], "mask_token_id": 1}
    attach(model, "part", write(tmp_path / "dflash", about, block_part(1, 1)))
    assert len(held) == len(EAGLES) + 1
    assert all(unsupported_draft_head(weights, config) for weights in held)
    attach(model, "part", write_part(tmp_path / "own", config, part_tensors(config)))
    assert unsupported_draft_head(held[-1], config) is None
