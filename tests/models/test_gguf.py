"""GGUF files written by the `gguf` package from transformers models, read back by ours."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.gguf_file import GgufFile
from outstride.models.gguf_model import read_config, stored_model
from tests.models.checkpoints import expected, make
from tests.models.drive import Hand, load, tokens
from tests.models.gguf_files import BIG, Kind, write


def compare(path: Path, theirs: Any) -> None:
    model = load(str(path), pages=64).model
    prompt = tokens(70)
    ours = Hand(model, list(range(12))).read(prompt, 30)
    np.testing.assert_allclose(ours, expected(theirs, prompt).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama tied",
        "llama biases",
        "llama head_dim",
        "llama theta",
        "llama yarn",
        "qwen2",
        "qwen3",
        "qwen3 tied biases",
        "qwen3 moe",
        "qwen2 moe",
        "mixtral",
        "mixtral window",
        "olmoe",
        "olmoe clipped",
        "olmo2",
        "olmo3",
        "olmo3 yarn",
        "phi3",
        "phi3 partial",
        "phi3 long",
        "granite",
        "granite tied",
        "gemma2 caps",
        "gemma3",
        "gemma4",
        "gemma4 own kv",
        "gpt oss",
        "glm4",
        "ministral3",
    ],
)
def test_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    scalar = {"query_pre_attn_scalar": 16} if variant.startswith(("gemma2", "gemma3")) else {}
    theirs = make(variant, **scalar)
    compare(write(theirs, tmp_path / "m.gguf"), theirs)


def test_smollm3(tmp_path: Path) -> None:
    theirs = make("smollm3", no_rope_layer_interval=4, num_hidden_layers=5)
    compare(write(theirs, tmp_path / "m.gguf"), theirs)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_packed_weights(kind: Any, tmp_path: Path) -> None:
    theirs = make("llama", **BIG)
    compare(write(theirs, tmp_path / "m.gguf", kind), theirs)


def test_mistral_is_stored_as_llama(tmp_path: Path) -> None:
    theirs = make("mistral window")
    compare(write(theirs, tmp_path / "m.gguf"), theirs)


def test_linear_rope(tmp_path: Path) -> None:
    theirs = make("llama linear")

    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    compare(write(theirs, tmp_path / "m.gguf", metadata=[scaling]), theirs)


def test_yarn_rope(tmp_path: Path) -> None:
    theirs = make("llama yarn")

    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    compare(write(theirs, tmp_path / "m.gguf", metadata=[scaling]), theirs)


def test_factors_of_frequencies(tmp_path: Path) -> None:
    theirs = make("llama llama3")
    plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq).numpy()
    path = tmp_path / "m.gguf"
    write(theirs, path, tensors={"rope_freqs.weight": factors})
    compare(path, theirs)


def test_missing_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(make("llama"), path, without=("blk.1.ffn_up.weight",))
    with pytest.raises(CorruptModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        load(str(path))


def test_unknown_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    odd = {"blk.0.attn_sinks.weight": np.zeros(6, dtype=np.float32)}
    write(make("llama"), path, tensors=odd)
    with pytest.raises(CorruptModel, match=r"blk\.0\.attn_sinks\.weight.*not part of"):
        load(str(path))


@pytest.mark.parametrize("size", [3, 30, 1000, -500])
def test_cut_off_file(size: int, tmp_path: Path) -> None:
    path = write(make("llama"), tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptModel, match="cut off"):
        load(str(path))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


DAMAGED = {
    "nested arrays": (0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1 << 60)),
    "a long array": (0, 1, text("k") + struct.pack("<IIQ", 9, 5, 1 << 60)),
    "many strings": (0, 1, text("k") + struct.pack("<IIQ", 9, 8, 1 << 60)),
    "a long string": (0, 1, text("k") + struct.pack("<IQ", 8, (1 << 64) - 1)),
    "an unknown type": (0, 1, text("k") + struct.pack("<I", 77)),
    "many entries": (0, 1 << 60, b""),
    "many tensors": (1 << 60, 0, b""),
    "no alignment": (0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
    "no dimensions": (1, 0, text("w") + struct.pack("<I", 0)),
    "many dimensions": (1, 0, text("w") + struct.pack("<I", 1 << 31)),
    "an empty tensor": (1, 0, text("w") + struct.pack("<IQQIQ", 2, 0, 4, 0, 0)),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_headers(what: str, tmp_path: Path) -> None:
    tensors, entries, rest = DAMAGED[what]
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest)
    with pytest.raises(CorruptModel, match="damaged in its header"):
        load(str(path))


def test_offsets_outside_the_file(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w")
    for offset, rows in ((1 << 63, 4), (0, 1 << 60)):
        path = tmp_path / "m.gguf"
        path.write_bytes(head + struct.pack("<IQQIQ", 2, 4, rows, 0, offset) + bytes(64))
        with pytest.raises(CorruptModel, match="reaches beyond its end"):
            GgufFile(path).tensor("w")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModel, match="not a GGUF file"):
        load(str(path))


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = write(make("llama"), tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, .*smollm3"):
        load(str(path))


def test_experts_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(make("llama"), path, metadata=[lambda w: w.add_expert_count(8)])
    with pytest.raises(CorruptModel, match="names experts and has none"):
        load(str(path))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_packed_experts(kind: Any, tmp_path: Path) -> None:
    sizes = {**BIG, "moe_intermediate_size": 32, "head_dim": 16}
    theirs = make("qwen3 moe", **sizes)
    compare(write(theirs, tmp_path / "m.gguf", kind), theirs)


def test_experts_are_views_of_the_file(tmp_path: Path) -> None:
    file = GgufFile(write(make("qwen3 moe"), tmp_path / "m.gguf"))
    stored = stored_model(file, read_config(file))
    first, last = (
        stored.tensors[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"].raw() for i in (0, 8)
    )
    assert last.ctypes.data - first.ctypes.data == 8 * first.nbytes


# --- models in several files ----------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    write(make("llama"), tmp_path / "m.gguf", shards=10)
    return sorted(tmp_path.glob("m-*-of-*.gguf"))


def test_any_part_stands_for_the_model(shards: list[Path]) -> None:
    assert len(shards) == 3
    for path in (*shards, shards[0].parent):
        compare(path, make("llama"))


def test_missing_parts_are_named(shards: list[Path]) -> None:
    shards[0].unlink()
    shards[2].unlink()
    with pytest.raises(CorruptModel, match=r"m-00001-of-00003\.gguf, m-00003-of-00003\.gguf"):
        load(str(shards[1]))
    with pytest.raises(CorruptModel, match=r"m-00001-of-00003"):
        load(str(shards[1].parent))


def test_parts_with_other_names(shards: list[Path]) -> None:
    other = shards[0].with_name("renamed.gguf")
    shards[0].rename(other)
    with pytest.raises(CorruptModel, match=r"in 3 files.*-00001-of-00003"):
        load(str(other))
    other.rename(shards[0])
    kept = shards[1].read_bytes()
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(CorruptModel, match="another part"):
        load(str(shards[0]))
    shards[1].write_bytes(kept[:-40])
    with pytest.raises(CorruptModel, match=r"00002-of-00003.*cut off"):
        load(str(shards[0]))


def test_a_folder_with_a_vision_part(tmp_path: Path) -> None:
    write(make("llama"), tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"GGUF")
    assert load(str(tmp_path), pages=2).path == tmp_path / "m.gguf"


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    write(make("llama"), tmp_path / "m.gguf")
    assert load(str(tmp_path), pages=2).path == tmp_path / "m.gguf"
