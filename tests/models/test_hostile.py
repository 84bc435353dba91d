"""Cut off, damaged and hostile model files: an error of this package, soon, and without much memory."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outstride.errors import CorruptModel, ModelError, OutstrideError, UnsupportedModel
from outstride.models.load import load, locate, opened
from tests.models.checkpoints import make, save
from tests.models.quantized import checkpoint, gptq

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MEMORY = 24 << 20
"""Bytes that an attempt to load a tiny file may take; tokenizers and configs are among them."""


def read_all(path: Path) -> None:
    """Everything that loading reads, without the computation."""
    config, open_model, _ = opened(path)
    stored = open_model()
    assert stored.config is config
    for tensor in stored.tensors.values():
        tensor.checked(slice(0, 2))


def refused(path: Path, says: str, kind: type[ModelError] = CorruptModel) -> None:
    """Loading fails with the error of this package, in less than a second of CPU and little memory."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(kind, match=says):
            read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 1
    assert peak < MEMORY + path.stat().st_size


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(make("llama", **SMALL), tmp_path_factory.mktemp("hostile") / "m")
    read_all(folder)  # imports
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


# --- safetensors ----------------------------------------------------------------------------------

NORM = "model.norm.weight"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = folder / "model.safetensors"
    header, data = header_of(path)
    changed = change(header)
    text = json.dumps(changed if isinstance(changed, tuple) else header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def set_norm(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[NORM].update(values)


def _moved(header: dict[str, Any]) -> None:
    start, end = header[NORM]["data_offsets"]
    header[NORM]["data_offsets"] = [start - 4, end - 4] if start else [start + 4, end + 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_norm(data_offsets=[0, 1 << 62]), "does not have"),
        (set_norm(shape=[1 << 61], data_offsets=[0, 1 << 63]), "impossible"),
        (set_norm(shape=[1 << 40, 1 << 40]), "does not have"),
        (
            set_norm(shape=[1 << 20], data_offsets=[1 << 40, (1 << 40) + (1 << 22)]),
            "beyond its end",
        ),
        (set_norm(data_offsets=[-8, 120]), "impossible"),
        (set_norm(data_offsets=[10, 2]), "does not have"),
        (set_norm(shape=[-32]), "impossible"),
        (set_norm(shape=[32.0]), "impossible"),
        (set_norm(shape=[True]), "impossible"),
        (set_norm(shape="32"), "impossible"),
        (set_norm(shape=[1] * 4000 + [32]), "impossible"),
        (set_norm(dtype="F128"), "F128"),
        (set_norm(dtype=["F32"]), "not described"),
        (_moved, "overlap"),
        (lambda header: header.update({NORM: None}), "not described"),
        (lambda header: header[NORM].pop("shape"), "lacks 'shape'|not described"),
        (lambda header: tuple(header), "not an object"),
        (lambda header: header.update({NORM: {}}), "lacks"),
    ],
)
def test_claims_of_a_safetensors_header(change: Any, says: str, folder: Path) -> None:
    refused(with_header(folder, change), says)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\x01",
        (1 << 63).to_bytes(8, "little"),
        (1 << 40).to_bytes(8, "little") + b"{}",
        (0).to_bytes(8, "little") + b"{}",
        (1 << 20).to_bytes(8, "little") + b"[" * (1 << 20),
        (6 << 20).to_bytes(8, "little") + b'{"a":' * (6 << 20 >> 2),
        (9).to_bytes(8, "little") + b'{"a": \xff}' * 9,
    ],
)
def test_headers_that_cannot_be_read(start: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(start)
    refused(folder, "cut off|damaged")


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle was opened')",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(name: str, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    refused(folder, rf"{name}.*run code.*safetensors", UnsupportedModel)
    with pytest.raises(UnsupportedModel, match="run code"):
        locate(str(folder / name))
    for protocol in (2, 4):
        weights.write_bytes(pickle.dumps(Bomb(), protocol))
        refused(folder, "pickled", UnsupportedModel)
    torch.save({"w": torch.zeros(3)}, weights)
    refused(folder, "pickled", UnsupportedModel)


def test_an_index_that_leads_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "model.safetensors", tmp_path / "other.safetensors")
    names = list(header_of(tmp_path / "other.safetensors")[0])
    places = {name: "../other.safetensors" for name in names if name != "__metadata__"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refused(folder, "missing")


# --- config.json --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": float("inf")},
        {"num_hidden_layers": float("nan")},
        {"num_hidden_layers": -3},
        {"num_hidden_layers": {"a": 1}},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 10**12},
        {"head_dim": -8},
        {"vocab_size": 10**15},
        {"hidden_size": 10**15},
        {"intermediate_size": "many"},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [7]},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9},
        {"rope_parameters": [1]},
        {"quantization_config": [1]},
        {"quantization_config": "gptq"},
        {"text_config": 3, "architectures": None, "model_type": None},
    ],
)
def test_configs_that_no_model_has(changes: dict[str, Any], folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    refused(folder, ".", ModelError)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 100_000, "[]", "nul", '"\\ud800', ""])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_no_config(text: str, file: str, folder: Path) -> None:
    (folder / file).write_text(text)
    refused(folder, file.replace(".", r"\."))


def test_settings_without_end(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 34)  # a hole: it takes no room on the disk
    refused(folder, "more than")


# --- random damage --------------------------------------------------------------------------------

NUMBERS = [
    0,
    1,
    2,
    255,
    256,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
]


def mutated(data: bytes, source: random.Random, end: int) -> bytes:
    """Data with one to four changes, most of them within the first `end` bytes."""
    found = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(min(end, len(found)) if source.random() < 0.9 else len(found))
        kind = source.randrange(6)
        if kind == 0:
            found[at] ^= 1 << source.randrange(8)
        elif kind == 1:
            found[at] = source.randrange(256)
        elif kind == 2:
            size = source.choice((4, 8))
            number = source.choice(NUMBERS) & ((1 << 8 * size) - 1)
            found[at : at + size] = number.to_bytes(size, "little")
        elif kind == 3:
            del found[at : at + source.choice((1, 8, 100))]
        elif kind == 4:
            found[at:at] = source.randbytes(source.choice((1, 8)))
        else:
            del found[max(at, 1) :]
        if not found:
            return b""
    return bytes(found)


def survives(path: Path, data: bytes, seen: dict[str, int]) -> None:
    """Loading gives a model or an error of this package."""
    path.write_bytes(data)
    target = path if path.suffix == ".gguf" else path.parent
    began = time.process_time()
    try:
        read_all(target)
        seen["loaded"] = seen.get("loaded", 0) + 1
    except OutstrideError as error:
        seen[type(error).__name__] = seen.get(type(error).__name__, 0) + 1
    assert time.process_time() - began < 2


@pytest.mark.parametrize("seed", range(4))
def test_damaged_safetensors(seed: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    data, source, seen = path.read_bytes(), random.Random(seed), dict[str, int]()
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(60):
        survives(path, mutated(data, source, end), seen)
    assert seen["CorruptModel"] > 20


@pytest.mark.parametrize("seed", range(2))
def test_damaged_quantized_safetensors(seed: int, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "m", gptq(), {"quant_method": "gptq", "bits": 4})
    path = folder / "model.safetensors"
    data, source, seen = path.read_bytes(), random.Random(seed), dict[str, int]()
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(40):
        survives(path, mutated(data, source, end), seen)
    assert seen["CorruptModel"] > 10


@pytest.mark.parametrize("seed", range(2))
def test_damaged_configs(seed: int, folder: Path) -> None:
    path = folder / "config.json"
    data, source, seen = path.read_bytes(), random.Random(seed), dict[str, int]()
    for _ in range(60):
        survives(path, mutated(data, source, len(data)), seen)
    assert seen["CorruptModel"] > 10


def test_a_sound_file_still_loads(folder: Path) -> None:
    assert load(str(folder), pages=1, weights="fp32").context == 16
