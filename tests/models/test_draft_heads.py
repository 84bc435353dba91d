"""Block drafters: their candidates against a slow implementation, their folders, and errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outstride.core.contracts import PassInput
from outstride.core.draft_heads import BlockDraftHead, head_of_kind
from outstride.core.graph import FloatArray, block, chain, tree
from outstride.core.proposal import Scores, Wants
from outstride.errors import CorruptModel, ModelNotFound, UnsupportedModel, VocabularyMismatch
from outstride.models.config import DecoderConfig
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import attach
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.cuda import available
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.models.drive import Hand, random_decoder, tiny, tokens

BLOCK, AUX_LAYERS, LAYERS, RANK = 5, (1, 2, 3), 2, 4

OPS: dict[str, Callable[[ModelWeights], Ops]] = {"reference": Reference}
if native.library_path() is not None:
    OPS["cpu"] = Cpu.of


def on_gpu(model: ModelWeights) -> Ops:
    from outstride.ops.cuda import Cuda

    return Cuda(model)


ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not available(), reason="needs an NVIDIA GPU and Triton"),
    ],
)
OPS["cuda"] = on_gpu
NEAR = {"reference": 2e-4, "cpu": 0.15, "cuda": 0.3}
"""How close logits are to the right ones, by backend."""


def part_tensors(config: DecoderConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    """A block drafter with random weights for a model of this shape."""
    source = torch.Generator().manual_seed(seed)
    size, inner = config.hidden_size, config.intermediate_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(*shape: int) -> torch.Tensor:
        spread: float = 1.3 * shape[-1] ** -0.5
        return torch.randn(shape, generator=source) * spread

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(width, generator=source)

    listed = torch.arange(0, config.vocab_size, 2, dtype=torch.int32)
    found = {
        "fc.weight": matrix(size, len(AUX_LAYERS) * size),
        "hidden_norm.weight": norm(size),
        "taps.scale": norm(len(AUX_LAYERS) * size),
        "norm.weight": norm(size),
        "mask.weight": torch.randn(1, size, generator=source),
        "vocabulary": listed,
        "follow.before.weight": torch.randn(len(listed) + 1, RANK, generator=source),
        "follow.after.weight": torch.randn(len(listed), RANK, generator=source),
    }
    for i in range(LAYERS):
        at = f"layers.{i}."
        found[f"{at}input_layernorm.weight"] = norm(size)
        found[f"{at}post_attention_layernorm.weight"] = norm(size)
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            found[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, size)
        found[f"{at}self_attn.o_proj.weight"] = matrix(size, wide)
        found[f"{at}mlp.gate_proj.weight"] = matrix(inner, size)
        found[f"{at}mlp.up_proj.weight"] = matrix(inner, size)
        found[f"{at}mlp.down_proj.weight"] = matrix(size, inner)
    return found


def write_part(
    folder: Path, config: DecoderConfig, tensors: dict[str, torch.Tensor], **changes: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = {
        "name": "tiny",
        "hidden_size": config.hidden_size,
        "layers": config.layers,
        "vocab_size": config.vocab_size,
        "vocabulary": "abc",
    }
    about: dict[str, Any] = {"outstride": "block-drafter", "version": 1, "target": target}
    about |= {"taps": list(AUX_LAYERS), "layers": LAYERS, "block": BLOCK} | changes
    (folder / "config.json").write_text(json.dumps(about))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def slow(
    config: DecoderConfig,
    part: dict[str, torch.Tensor],
    table: torch.Tensor,
    hidden: dict[int, FloatArray],
    last: int,
) -> FloatArray:
    """Logits [BLOCK - 1, tokens], one position, one head, one key at a time.

    hidden: by layer, the hidden states [context, hidden] that enter it.
    """
    eps, size, head = config.norm_eps, config.hidden_size, config.head_dim
    group = config.heads // config.kv_heads
    angles = torch.tensor(config.frequencies)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + eps) * weight

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        low, high = x[: head // 2], x[head // 2 :]
        cos, sin = torch.cos(position * angles), torch.sin(position * angles)
        return torch.cat([low * cos - high * sin, high * cos + low * sin])

    count = len(hidden[AUX_LAYERS[0]])
    context = []
    for c in range(count):
        features = torch.cat([torch.from_numpy(hidden[layer][c]) for layer in AUX_LAYERS])
        fused = part["fc.weight"] @ (features * part["taps.scale"])
        context.append(norm(fused, part["hidden_norm.weight"]))
    rows = [table[last], *([part["mask.weight"][0]] * (BLOCK - 1))]
    for i in range(LAYERS):
        at = f"layers.{i}."
        normed = [norm(x, part[f"{at}input_layernorm.weight"]) for x in rows]
        places = [*enumerate(context), *((count + j, x) for j, x in enumerate(normed))]
        keys, values = [], []
        for position, x in places:
            k = (part[f"{at}self_attn.k_proj.weight"] @ x).view(config.kv_heads, head)
            keys.append([rotated(h, position) for h in k])
            values.append((part[f"{at}self_attn.v_proj.weight"] @ x).view(config.kv_heads, head))
        following = []
        for j, x in enumerate(rows):
            q = (part[f"{at}self_attn.q_proj.weight"] @ normed[j]).view(config.heads, head)
            gathered = []
            for h in range(config.heads):
                query = rotated(q[h], count + j)
                scores = torch.stack([query @ k[h // group] for k in keys]) / math.sqrt(head)
                shares = scores.softmax(0)
                gathered.append(shares @ torch.stack([v[h // group] for v in values]))
            x = x + part[f"{at}self_attn.o_proj.weight"] @ torch.cat(gathered)
            y = norm(x, part[f"{at}post_attention_layernorm.weight"])
            gate = part[f"{at}mlp.gate_proj.weight"] @ y
            inner = torch.nn.functional.silu(gate) * (part[f"{at}mlp.up_proj.weight"] @ y)
            following.append(x + part[f"{at}mlp.down_proj.weight"] @ inner)
        rows = following
    head_rows = table[part["vocabulary"].long()]
    final = [head_rows @ norm(x, part["norm.weight"]) for x in rows[1:]]
    assert all(row.shape == (len(part["vocabulary"]),) and size for row in final)
    return torch.stack(final).numpy()


def table_of(config: DecoderConfig) -> torch.Tensor:
    """[vocab_size, hidden]: the embedding of a random decoder, which is also its LM head."""
    source = torch.Generator().manual_seed(0)
    [(name, shape)] = list(config.shapes().items())[:1]
    assert name == "model.embed_tokens.weight"
    values: torch.Tensor = torch.randn(shape, generator=source) * 1.5 * shape[-1] ** -0.5
    step = values.abs().amax(dim=1, keepdim=True) / 127
    return (values / step).round() * step


def request(model: Decoder, hand: Hand, last: int, best: int = 16) -> PassInput:
    masks = [head_of_kind(model.draft_heads["part"], BlockDraftHead).mask] * (BLOCK - 1)
    wants = Wants(nodes=tuple(range(1, BLOCK)), best=best)
    graph = block([last, *masks], len(hand.positions))
    return hand.work(graph, wants, offset=0, draft_head="part")


def candidates(model: Decoder, hand: Hand, last: int, best: int = 16) -> Scores:
    return model.forward([request(model, hand, last, best)]).wait()[0]


@pytest.fixture(params=[*(name for name in OPS if name != "cuda"), ON_GPU])
def with_head(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Decoder, DecoderConfig, Any]:
    config = tiny(layers=3, tied=True)
    model = random_decoder(config, pages=64, make_ops=OPS[request.param], rounded=True)
    part = part_tensors(config)
    attach(model, "part", write_part(tmp_path / "part", config, part))
    return model, config, part


def test_candidates_are_those_of_a_slow_implementation(with_head: Any) -> None:
    model, config, part = with_head
    said, hand = tokens(21), Hand(model, list(range(20)))
    graph = chain(said, 0)
    hidden = hand.run(graph, Wants(nodes=(), hidden=AUX_LAYERS)).hidden
    hand.keep(graph, range(len(said)))
    right = slow(config, part, table_of(config), dict(hidden), 7)
    scores = candidates(model, hand, 7)
    assert scores.values is not None
    kind = model.ops.name.split()[0]
    exact = kind == "reference"
    listed = part["vocabulary"].numpy()
    for row, (found, values) in enumerate(zip(scores.best, scores.values, strict=True)):
        places = np.searchsorted(listed, found)
        assert (listed[places] == found).all()
        np.testing.assert_allclose(values, right[row][places], atol=NEAR[kind])
        if exact:
            np.testing.assert_array_equal(found, listed[np.argsort(-right[row])[:16]])


def test_draft_kv_follows_chunks_trees_and_moves(with_head: Any) -> None:
    """However the model's KV was made, that of the draft head is the same to the last bit."""
    model, _, _ = with_head
    said = tokens(21)
    whole = Hand(model, list(range(20)))
    whole.read(said)
    other = Hand(model, list(range(20, 40)))
    other.read(said[:17], chunk=5)
    branches = tree([said[17], 3, 4, said[18], said[19]], [-1, -1, 0, 0, 3], 17)
    other.run(branches)
    other.keep(branches, [0, 3, 4])
    candidates(model, other, 9)  # what it leaves in the slots ahead must not matter
    other.read(said[20:])
    one, two = (candidates(model, hand, 7) for hand in (whole, other))
    np.testing.assert_array_equal(one.best, two.best)
    np.testing.assert_array_equal(one.values, two.values)


def test_candidates_stay_right_pass_after_pass(with_head: Any) -> None:
    """Backends that replay passes, or keep their metadata, must not repeat the last one."""
    model, _, _ = with_head
    said, decoding = tokens(140, seed=3), Hand(model, list(range(20)))
    decoding.read(said[:120])
    for end in range(120, 140):
        one = candidates(model, decoding, 7 + end % 3)
        if end % 4 == 0:
            other = Hand(model, list(range(20, 40)))
            other.read(said[:end], chunk=50)
            two = candidates(model, other, 7 + end % 3)
            np.testing.assert_array_equal(one.best, two.best)
            np.testing.assert_array_equal(one.values, two.values)
        decoding.read(said[end : end + 1])


def test_candidates_do_not_depend_on_the_batch(with_head: Any) -> None:
    """A draft head may take a shorter way for one sequence than for several."""
    model, _, _ = with_head
    hands = [Hand(model, list(range(start, start + 20))) for start in (0, 20, 40)]
    for hand, length in zip(hands, (21, 70, 33), strict=True):
        hand.read(tokens(length, seed=length))
    alone = [candidates(model, hand, 7 + i) for i, hand in enumerate(hands)]
    together = model.forward([request(model, hand, 7 + i) for i, hand in enumerate(hands)]).wait()
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.best, other.best)
        np.testing.assert_array_equal(one.values, other.values)


def test_a_draft_head_changes_no_logit(with_head: Any) -> None:
    model, config, _ = with_head
    bare = random_decoder(
        config,
        pages=64,
        make_ops=OPS[model.ops.name.split()[0]],
        rounded=True,
    )
    found = [Hand(one, list(range(20))).read(tokens(30), chunk=7) for one in (model, bare)]
    np.testing.assert_array_equal(found[0], found[1])


def test_int8_matrices_are_read_with_their_scales(tmp_path: Path) -> None:
    config = tiny(layers=3, tied=True)
    part = part_tensors(config)
    packed: dict[str, torch.Tensor] = {}
    for name, value in part.items():
        if value.dim() == 2 and name.endswith("proj.weight"):
            scale = value.abs().amax(dim=1) / 127
            packed[name] = (value / scale[:, None]).round().to(torch.int8)
            packed[f"{name}.scale"] = scale
        else:
            packed[name] = value
    found = []
    for folder, tensors in (("a", part), ("b", packed)):
        model = random_decoder(config, rounded=True)
        attach(model, "part", write_part(tmp_path / folder, config, tensors))
        hand = Hand(model, list(range(20)))
        hand.read(tokens(21))
        values = candidates(model, hand, 7).values
        assert values is not None
        found.append(values)
    np.testing.assert_allclose(found[0], found[1], atol=0.2)
    assert not np.array_equal(found[0], found[1])


def test_a_folder_for_another_model_is_refused(tmp_path: Path) -> None:
    config = tiny(layers=3, tied=True)
    model, part = random_decoder(config), part_tensors(config)
    with pytest.raises(ModelNotFound, match=r"no config.json"):
        attach(model, "part", tmp_path / "nothing")
    folder = write_part(tmp_path / "other", config, part, outstride="heads-of-tomorrow")
    with pytest.raises(UnsupportedModel, match="heads-of-tomorrow"):
        attach(model, "part", folder)
    folder = write_part(tmp_path / "vocabulary", config, part)
    with pytest.raises(VocabularyMismatch, match="vocabulary"):
        attach(model, "part", folder, vocabulary="xyz")
    folder = write_part(tmp_path / "wide", config, part, target={"hidden_size": 64})
    with pytest.raises(UnsupportedModel, match="hidden_size 64"):
        attach(model, "part", folder)
    short = {k: v for k, v in part.items() if k != "norm.weight"}
    with pytest.raises(CorruptModel, match=r"norm\.weight"):
        attach(model, "part", write_part(tmp_path / "short", config, short))
    (tmp_path / "vocabulary" / "model.safetensors").write_bytes(b"12")
    with pytest.raises(CorruptModel, match="cannot be read"):
        attach(model, "part", tmp_path / "vocabulary")


@pytest.mark.parametrize("fault", ["taps", "no block", "ids", "below", "no vocabulary"])
def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path, fault: str) -> None:
    config = tiny(layers=3, tied=True)
    part, changes = part_tensors(config), dict[str, Any]()
    if fault == "taps":
        changes["taps"] = [1, 2, 9]
    elif fault == "no block":
        changes["block"] = None
    elif fault == "no vocabulary":
        del part["vocabulary"]
    else:
        part["vocabulary"][0 if fault == "below" else -1] = -5 if fault == "below" else 5000
    with pytest.raises(CorruptModel, match="not a complete block-drafter"):
        attach(random_decoder(config), "part", write_part(tmp_path / "p", config, part, **changes))
