"""Types of GGUF blocks: their values, and the computing formats that they become."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from outstride.models.choose_weights import GGUF, GGUF_4BIT
from outstride.models.gguf_file import GgufFile
from outstride.models.load import file_format_of, load, opened
from outstride.ops.cpu import native
from tests.models.checkpoints import make
from tests.models.gguf_files import BIG, Kind, write
from tests.models.test_stored import logits_of, packed_arrays, q4_1_file, random_blocks

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="no native kernels were built"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))


def mixed_file(path: Path) -> Path:
    """Like Q4_K_M files: all MLP outputs, and the values of one layer, have more bits."""
    kinds = {"ffn_down": Kind.Q8_0, "blk.1.attn_v": Kind.Q8_0}
    return write(make("llama", **BIG), path, Kind.Q4_1, kinds=kinds)


def test_matrices_with_more_bits_in_the_file_stay_int8(tmp_path: Path) -> None:
    path = mixed_file(tmp_path / "m.gguf")
    loaded = load(str(path), pages=8, weights="int4")
    four = packed_arrays(loaded.model)
    eight = packed_arrays(load(str(path), pages=8, weights="int8").model)
    precise = {name.removesuffix(".scale") for name in four if name.endswith(".scale")}
    assert precise == {"vocabulary", "embedding", "0.down", "1.down", "2.down", "1.qkv"}
    for name in precise:
        np.testing.assert_array_equal(four[f"{name}.data"], eight[f"{name}.data"])
    again = load(str(path), pages=8, weights="int4").model
    np.testing.assert_array_equal(logits_of(again), logits_of(loaded.model))
    exact = logits_of(load(str(path), pages=8, weights="fp32").model)
    off = np.sqrt(np.square(logits_of(again) - exact).mean() / np.square(exact).mean())
    assert off < 0.08


def test_a_file_without_4_bit_codes_becomes_int4_as_a_whole(tmp_path: Path) -> None:
    path = write(make("llama", **BIG), tmp_path / "m.gguf", Kind.Q8_0)
    four = packed_arrays(load(str(path), pages=8, weights="int4").model)
    assert {name for name in four if name.endswith(".scale")} == {
        "vocabulary.scale",
        "embedding.scale",
    }


def test_the_format_of_a_file_by_the_share_of_its_codes(tmp_path: Path) -> None:
    def found(path: Path) -> str:
        return file_format_of(path, opened(path)[1])

    assert found(q4_1_file(tmp_path / "a.gguf")) == GGUF_4BIT
    assert found(mixed_file(tmp_path / "b.gguf")) == GGUF_4BIT
    more = {"ffn_": Kind.Q8_0}
    assert found(write(make("llama", **BIG), tmp_path / "c.gguf", Kind.Q4_1, kinds=more)) == GGUF


TYPES = sorted(kind.name for kind in gguf.quants._type_traits)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_has_the_values_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    """As rows of stacked experts, the third of them."""
    raw = random_blocks(name, 4 * 6, 512)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("w", raw.reshape(4, 6, -1), raw_dtype=Kind[name])
    for write_part in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write_part()
    file = GgufFile(tmp_path / "t.gguf")
    assert file.tensors["w"].shape == (4, 6, 512)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, Kind[name])[12:18]
        found = file.tensor("w", shape=(6, 512), start=12).floats(slice(None))
    np.testing.assert_array_equal(found, wanted)
