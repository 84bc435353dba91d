"""Model files that are read row by row: the same weights as read as a whole, and never all at once."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from outstride.core.graph import FloatArray
from outstride.errors import CorruptModel
from outstride.models import checkpoint, conversion_progress
from outstride.models.decoder import Decoder
from outstride.models.load import load, opened
from outstride.models.stored import StoredRows
from outstride.ops.cpu import Cpu, native
from outstride.ops.cpu.int4 import GROUP, Int4Matrix
from outstride.ops.cpu.weights_file import WeightsFile
from outstride.ops.matrix_rows import DEQUANTIZED_KINDS, pack_all
from tests.models.checkpoints import make, save
from tests.models.drive import Hand, tokens
from tests.models.gguf_files import BIG, Kind, write

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="no native kernels were built"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_blocks(kind: str, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Random codes with sound scales."""
    rng = np.random.default_rng(len(kind))
    per_block, size = gguf.constants.GGML_QUANT_SIZES[Kind[kind]]
    raw = rng.integers(0, 256, (rows * columns // per_block, size), dtype=np.uint8)
    at = {"Q6_K": [208], "Q4_1": [0, 2], "Q4_K": [0, 2]}.get(kind, [0])
    for start in at:
        halves = rng.uniform(-0.1, 0.1, len(raw)).astype(np.float16)
        raw[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def tensor_of(raw: npt.NDArray[np.uint8], kind: str, columns: int) -> Any:
    from outstride.models.gguf_file import GgufTensor

    return GgufTensor("w", (len(raw), columns), Kind[kind], raw, None, "w in a file")


def repacked(raw: npt.NDArray[np.uint8], kind: str, columns: int, depth: int) -> Int4Matrix:
    rows = StoredRows([tensor_of(raw, kind, columns)])
    assert rows.block_kind == kind
    matrix = Int4Matrix.empty(len(raw), columns, depth)
    pack_all([(matrix, rows)])
    return matrix


# --- blocks of GGUF files ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEQUANTIZED_KINDS)
def test_native_dequantization_gives_the_bits_of_the_gguf_package(kind: str) -> None:
    raw = random_blocks(kind, 19, 768)
    theirs = gguf.quants.dequantize(raw, Kind[kind])
    ours = tensor_of(raw, kind, 768).floats(slice(None))
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    some = tensor_of(raw, kind, 768).floats(np.array([7, 0, 7, 18]))
    np.testing.assert_array_equal(some, theirs[[7, 0, 7, 18]])


def test_repacked_q4_1_is_what_quantizing_its_values_gives() -> None:
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((40, 320)) * rng.uniform(0.01, 3, (40, 1))).astype(np.float32)
    raw = gguf.quants.quantize(weight, Kind.Q4_1)
    values = gguf.quants.dequantize(raw, Kind.Q4_1).astype(np.float32)
    for depth in (320, 384):
        matrix = repacked(raw, "Q4_1", 320, depth)
        np.testing.assert_array_equal(matrix.dense(), values)
        np.testing.assert_array_equal(matrix.data, Int4Matrix.of(values, None, depth).data)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_repacked_weights_have_the_values_of_the_file(kind: str) -> None:
    """Any codes, negative scales too, exactly."""
    raw = random_blocks(kind, 50, 256)
    values = gguf.quants.dequantize(raw, Kind[kind])
    np.testing.assert_array_equal(repacked(raw, kind, 256, 256).dense(), values)


def test_repacked_q4_k_rounds_scales_and_minima_to_half_precision() -> None:
    raw = random_blocks("Q4_K", 33, 512)
    values = gguf.quants.dequantize(raw, Kind.Q4_K)
    found = repacked(raw, "Q4_K", 512, 512).dense()
    blocks = raw.reshape(-1, 144)
    d, low = (np.abs(blocks[:, i : i + 2].copy().view(np.float16).astype(float)) for i in (0, 2))
    bound = (d * 63 * 15 + low * 63) * 2.0**-11 + 2.0**-20
    off = np.abs(found.astype(float) - values).reshape(len(blocks), -1)
    assert (off <= bound).all()
    assert off.max() > 0


def test_rows_in_another_order_with_rows_of_zeros() -> None:
    one, two = (tensor_of(random_blocks(kind, 20, 64), kind, 64) for kind in ("Q4_1", "Q4_1"))
    order = np.array([*range(39, -1, -1), -1, 3, -1])
    rows = StoredRows([one, two], order)
    values = np.concatenate([t.floats(slice(None)) for t in (one, two)])
    expected = np.where(order[:, None] < 0, np.float32(0), values[order])
    np.testing.assert_array_equal(rows.floats(0, 43), expected)
    matrix = Int4Matrix.empty(43, 64, 64)
    pack_all([(matrix, rows)])
    np.testing.assert_array_equal(matrix.dense(), expected)


def test_native_int4_quantization_gives_the_bits_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    for shape in ((37, 96), (16, 70), (5, 3), (64, 512)):
        weight = (rng.standard_normal(shape) * rng.uniform(1e-4, 30, (shape[0], 1))).astype("f4")
        weight[::7, ::5] *= 8
        weight[1] = 0
        depth = -(-shape[1] // GROUP) * GROUP
        ours = Int4Matrix.of(weight, None, depth).data
        with monkeypatch.context() as patched:
            patched.setattr(native, "library_path", lambda: None)
            theirs = Int4Matrix.of(weight, None, depth).data
        np.testing.assert_array_equal(ours, theirs)


# --- whole models -----------------------------------------------------------------------------------


def packed_arrays(model: Decoder) -> dict[str, Any]:
    assert isinstance(model.ops, Cpu)
    return model.ops.runtime.weights.arrays()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    "variant", ["llama", "llama tied", "llama biases", "qwen3 tied biases", "qwen3 layer types"]
)
def test_row_by_row_gives_what_whole_tensors_give(
    variant: str, weights: str, tmp_path: Path
) -> None:
    theirs = make(variant)
    half = save(make(variant).to(torch.bfloat16), tmp_path / "half")
    paths = [save(theirs, tmp_path / "whole"), half]
    paths.append(save(theirs, tmp_path / "shards", max_shard_size="60KB"))
    paths.append(write(theirs, tmp_path / "m.gguf", permuted="llama" in variant))
    for path in paths:
        config, open_model, _ = opened(path)
        bits = int(weights.removeprefix("int"))
        whole = Decoder.from_tensors(
            config, open_model().read(), pages=2, make_ops=partial(Cpu.of, bits=bits)
        )
        expected = packed_arrays(whole)
        for _ in range(2):  # converted, then from the kept file
            found = packed_arrays(load(str(path), pages=2, weights=weights).model)
            assert found.keys() == expected.keys()
            for name, array in found.items():
                np.testing.assert_array_equal(array, expected[name], err_msg=f"{path} {name}")


class LiveFloats:
    """Counts the float32 weights that are in memory, and the largest number at any time."""

    def __init__(self) -> None:
        self.now = self.peak = self.total = 0
        self._lock = threading.Lock()

    def add(self, array: FloatArray) -> None:
        with self._lock:
            self.now += array.size
            self.total += array.size
            self.peak = max(self.peak, self.now)
        weakref.finalize(array, self._drop, array.size)

    def _drop(self, size: int) -> None:
        with self._lock:
            self.now -= size


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_no_more_than_one_layer_is_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    folder = save(make("llama", num_hidden_layers=12).to(torch.bfloat16), tmp_path / "model")
    live, floats = LiveFloats(), checkpoint.CheckpointTensor.floats

    def counted(self: checkpoint.CheckpointTensor, rows: Any) -> FloatArray:
        found = floats(self, rows)
        if found.ndim == 2:
            live.add(found)
        return found

    monkeypatch.setattr(checkpoint.CheckpointTensor, "floats", counted)
    loaded = load(str(folder), pages=2, weights=weights)
    shapes = loaded.model.config.shapes()
    sizes = {name: shape[0] * shape[-1] for name, shape in shapes.items() if len(shape) == 2}
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    assert live.total == sum(sizes.values())
    assert 0 < live.peak <= max(layer, 2 * sizes["model.embed_tokens.weight"])


def logits_of(model: Decoder) -> FloatArray:
    return Hand(model, list(range(4))).read(tokens(40), 7)


def q4_1_file(path: Path) -> Path:
    return write(make("llama", **BIG), path, Kind.Q4_1, permuted=True)


def kept_file(cache: Path) -> Path:
    (found,) = (cache / "converted").glob("*.safetensors")
    return found


def test_codes_of_a_4_bit_file_are_not_stored_twice(tmp_path: Path, own_cache: Path) -> None:
    path = q4_1_file(tmp_path / "m.gguf")
    first = load(str(path), pages=8, weights="int4").model
    names = WeightsFile(kept_file(own_cache)).names
    assert "vocabulary.data" in names
    assert not [name for name in names if name[0].isdigit() and name.endswith(".data")]
    second = load(str(path), pages=8, weights="int4").model
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(logits_of(second), logits_of(first))


def test_a_file_that_changed_in_silence_is_noticed(tmp_path: Path, own_cache: Path) -> None:
    """Its size and time are as before, but codes that are taken from it are not."""
    path = q4_1_file(tmp_path / "m.gguf")
    first = load(str(path), pages=8, weights="int4").model
    info = opened(path)[1]().tensors["model.layers.1.mlp.down_proj.weight"]
    data, stat = bytearray(path.read_bytes()), path.stat()
    at = data.index(info.raw()[3].tobytes())
    data[at + 7] ^= 16
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = load(str(path), pages=8, weights="int4").model
    assert second.digest != first.digest
    assert WeightsFile(kept_file(own_cache)).about["digest"] == second.digest
    assert not np.array_equal(logits_of(second), logits_of(first))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("place", ["header", "data", "end"])
def test_a_damaged_kept_file_is_made_anew(
    tmp_path: Path, own_cache: Path, weights: str, place: str
) -> None:
    path = q4_1_file(tmp_path / "m.gguf")
    first = load(str(path), pages=8, weights=weights).model
    kept = kept_file(own_cache)
    sound = kept.read_bytes()
    data = bytearray(sound)
    at = {"header": sound.index(first.digest.encode()) + 5, "data": -1000, "end": -1}[place]
    data[at] ^= 1
    kept.write_bytes(data)
    second = load(str(path), pages=8, weights=weights).model
    assert second.fingerprint == first.fingerprint
    assert kept.read_bytes() == sound
    np.testing.assert_array_equal(logits_of(second), logits_of(first))


@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, weights: str) -> None:
    path = q4_1_file(tmp_path / "m.gguf")
    info = opened(path)[1]().tensors["model.layers.1.mlp.down_proj.weight"]
    data = bytearray(path.read_bytes())
    at = data.index(info.raw()[3].tobytes())
    data[at : at + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(CorruptModel, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*NaN"):
        load(str(path), pages=4, weights=weights)


def test_the_digest_is_that_of_the_file_in_every_format(tmp_path: Path) -> None:
    path = q4_1_file(tmp_path / "m.gguf")
    found = {load(str(path), pages=2, weights=w).model.digest for w in ("fp32", "int8", "int4")}
    assert len(found) == 1


def test_long_conversions_say_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = q4_1_file(tmp_path / "m.gguf")
    load(str(path), pages=2, weights="int8")
    assert not capsys.readouterr().err
    monkeypatch.setattr(conversion_progress, "_INTERVAL", 0.002)
    load(str(path), pages=2, weights="int4")
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert [line for line in lines if "Converting m (first start only): " not in line] == []
