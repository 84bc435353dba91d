"""Checkpoints: the same logits as transformers for every architecture, and clear errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from outstride.core.graph import NodeId, chain, tree
from outstride.core.proposal import Wants
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import DecoderConfig
from outstride.ops.reference import Reference
from tests.models.checkpoints import VARIANTS, expected, make, save
from tests.models.drive import Hand, load, logits, tokens


def close(ours: Any, theirs: torch.Tensor) -> None:
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = make(variant)
    model = load(str(save(theirs, tmp_path)), pages=64).model
    prompt = tokens(70)
    reference = expected(theirs, prompt)
    assert reference.std() > 0.5
    close(Hand(model, list(range(12))).read(prompt), reference)
    hand = Hand(model, list(range(32, 20, -1)))
    close(hand.read(prompt, 9), reference)
    graph = tree(tokens(9, seed=1), [-1, 0, 0, 1, 2, 2, 5, -1, 7], 70)
    scored = logits(hand.run(graph))
    for node in (3, 4, 6, 8):
        path = [int(graph.tokens[n]) for n in graph.path(NodeId(node))]
        close(scored[node], expected(theirs, prompt + path)[-1])


def test_long_positions(tmp_path: Path) -> None:
    theirs = make("llama llama3")
    model = load(str(save(theirs, tmp_path)), pages=64).model
    prompt = tokens(250)
    close(Hand(model, list(range(20))).read(prompt, 100), expected(theirs, prompt))


def test_shards(tmp_path: Path) -> None:
    theirs = make("qwen2")
    folder = save(theirs, tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = load(str(folder), pages=16).model
    prompt = tokens(20)
    close(Hand(model, [0, 1]).read(prompt), expected(theirs, prompt))


def test_half_precision_weights(tmp_path: Path) -> None:
    folder = save(make("llama").to(torch.bfloat16), tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load(str(folder), pages=16).model
    prompt = tokens(20)
    close(Hand(model, [0, 1]).read(prompt), expected(theirs, prompt))


def test_same_weights_same_fingerprint(tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path / "a")
    one, two = (load(str(folder), pages=4).model.fingerprint for _ in range(2))
    other = load(str(save(make("llama", seed=1), tmp_path / "b")), pages=4).model.fingerprint
    assert one == two != other


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("llama"), tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    safetensors.torch.save_file(tensors, path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_tensor(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CorruptModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        load(str(folder))


def test_extra_tensor(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.1.mlp.extra.weight": torch.zeros(2)})
    with pytest.raises(CorruptModel, match=r"mlp\.extra\.weight.*not part of"):
        load(str(folder))


def test_harmless_tensors(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, **{name: torch.zeros(4)})
    assert load(str(folder), pages=1).context == 16


def test_duplicate_of_a_tied_head(tmp_path: Path) -> None:
    folder = save(make("llama tied"), tmp_path)
    change_tensors(folder, **{"lm_head.weight": torch.zeros(97, 48)})
    ops = load(str(folder), pages=1).model.ops
    assert isinstance(ops, Reference)
    assert ops.lm_head is ops.embedding.table


def test_wrong_shape(folder: Path) -> None:
    change_tensors(folder, **{"model.norm.weight": torch.zeros(47)})
    with pytest.raises(CorruptModel, match=r"model\.norm\.weight.*\(47,\).*\(48,\)"):
        load(str(folder))


def test_integers_are_no_weights(folder: Path) -> None:
    change_tensors(folder, **{"model.norm.weight": torch.zeros(48, dtype=torch.int32)})
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight"):
        load(str(folder))


@pytest.mark.parametrize("size", [4, 500, -100])
def test_cut_off_file(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(CorruptModel, match=r"model\.safetensors.*cut off"):
        load(str(folder))


def test_missing_shard(tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path, max_shard_size="60KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CorruptModel, match=lost.name):
        load(str(folder))


def test_unsupported_architecture(folder: Path) -> None:
    change_config(folder, architectures=["NoSuchForCausalLM"], model_type="nosuch")
    with pytest.raises(UnsupportedModel, match=r"NoSuchForCausalLM.*llama, .*mistral.*qwen2"):
        load(str(folder))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "axial"}}, "axial"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"quantization_config": {"bits": 4}}, "quantized with"),
    ],
)
def test_unsupported_switches(folder: Path, changes: dict[str, Any], words: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        load(str(folder))


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptModel, match=r"config\.json"):
        load(str(folder))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(CorruptModel, match="num_hidden_layers"):
        load(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CorruptModel, match=r"no config\.json"):
        load(str(folder))


def test_old_names_of_rope_settings() -> None:
    old = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    }
    rope = DecoderConfig.from_hf(old).rope
    assert (rope.theta, rope.kind, rope.factor, rope.original_context) == (5e5, "yarn", 8.0, 64)


def test_features_are_stored_and_moved(sound: Path) -> None:
    model = load(str(sound), pages=16, features=(1, 3)).model
    hand = Hand(model, [4, 2, 9])
    hand.read(tokens(20))
    graph = tree(tokens(4, seed=1), [-1, 0, 0, 2], 20)
    scores = hand.run(graph, Wants(hidden=(1, 3)))
    hand.keep(graph, [0, 2, 3])
    for node, position in ((0, 20), (2, 21), (3, 22)):
        right = np.concatenate([scores.hidden[1][node], scores.hidden[3][node]])
        assert np.array_equal(model.feature(hand.table, position), right)


def test_extra_rows(sound: Path) -> None:
    model = load(str(sound), pages=16).model
    assert isinstance(model.ops, Reference)
    rows = model.ops.embedding.table[[5, 7]].clone()
    first = model.add_rows(rows)
    assert first == 97
    assert model.add_rows(rows) == 99
    hand = Hand(model, [0, 1])
    assert np.array_equal(
        logits(hand.run(chain([3, 97, 98, 4]))), logits(hand.run(chain([3, 5, 7, 4])))
    )


def test_only_what_is_wanted(sound: Path) -> None:
    hand = Hand(load(str(sound), pages=16).model, list(range(12)))
    graph = chain(tokens(100))
    every = logits(hand.run(graph))
    plain = hand.run(graph, Wants(), given=100)
    assert plain.nodes.tolist() == [99]
    assert plain.best.tolist() == [[int(every[99].argmax())]]
    assert plain.logits is None
    assert plain.rows is None
    wants = Wants(nodes=tuple(range(100)), best=3, logprobs=2, of={4: 11}, rows=True)
    asked = hand.run(graph, wants)
    assert asked.best.shape == (100, 3)
    assert [row[0] for row in asked.best.tolist()] == every.argmax(axis=1).tolist()
    assert asked.logprobs[4][0][0] == 11
    assert asked.logprobs[5][0][0] == asked.best[5, 0]
    assert asked.rows is not None
    assert asked.rows.shape == (100, 97)
    nothing = hand.run(graph, Wants(nodes=()))
    assert len(nothing.nodes) == 0


def test_errors_come_out_of_wait(sound: Path) -> None:
    hand = Hand(load(str(sound), pages=16).model, [0, 1])
    with pytest.raises(ValueError, match="hidden states"):
        hand.run(chain([1, 2]), layers=(1, 3))
    assert len(logits(hand.run(chain([1, 2])))) == 2
