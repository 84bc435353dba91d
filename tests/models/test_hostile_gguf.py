"""Cut off, damaged and hostile GGUF files: an error of this package, soon, and without much memory."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from outstride.errors import ModelError
from tests.models.checkpoints import make
from tests.models.gguf_files import write
from tests.models.test_hostile import SMALL, mutated, read_all, refused, survives


def gguf_header(entries: list[bytes], tensors: list[bytes], /, **counts: int) -> bytes:
    count = counts.get("tensors", len(tensors)), counts.get("entries", len(entries))
    return b"GGUF" + struct.pack("<IQQ", 3, *count) + b"".join([*entries, *tensors])


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


ARCHITECTURE = entry("general.architecture", 8, text("llama"))
DEEP = b"".join(struct.pack("<IQ", 9, 1) for _ in range(50_000))


@pytest.mark.parametrize(
    "data",
    [
        b"GGUF",
        b"GGUF" + b"\xff" * 20,
        gguf_header([], [], entries=1 << 62),
        gguf_header([], [], tensors=1 << 62),
        gguf_header([struct.pack("<Q", 1 << 63)], []),
        gguf_header([entry("a", 9, struct.pack("<IQ", 8, 1 << 60))], []),
        gguf_header([entry("a", 9, struct.pack("<IQ", 0, 1 << 62))], []),
        gguf_header([entry("a", 9, struct.pack("<IQ", 4, 1 << 62))], []),
        gguf_header([entry("a", 9, DEEP)], []),
        gguf_header([entry("a", 99, b"")], []),
        gguf_header([ARCHITECTURE, entry("general.alignment", 4, struct.pack("<I", 0))], []),
        gguf_header([ARCHITECTURE, entry("general.alignment", 8, text("x"))], []),
        gguf_header([ARCHITECTURE], [tensor("token_embd.weight", [1 << 62, 1 << 62])]),
        gguf_header([ARCHITECTURE], [tensor("token_embd.weight", [])]),
        gguf_header([ARCHITECTURE], [tensor("token_embd.weight", [0, 0])]),
        gguf_header([ARCHITECTURE], [tensor("token_embd.weight", [8], offset=1 << 63)]),
        gguf_header([ARCHITECTURE], [text("t") + struct.pack("<I", 1 << 31)]),
    ],
)
def test_claims_of_a_gguf_header(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused(path, ".", ModelError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 1 << 31),
        ("llama.attention.head_count", 0),
        ("llama.embedding_length", 1 << 31),
        ("llama.expert_count", 1 << 31),
    ],
)
def test_counts_in_the_metadata_of_a_gguf_file(
    key: str, value: int, gguf_file: bytes, tmp_path: Path
) -> None:
    name = text(key) + struct.pack("<I", 4)
    if key == "llama.expert_count":
        data = gguf_file[:16] + struct.pack("<Q", int.from_bytes(gguf_file[16:24], "little") + 1)
        data += name + struct.pack("<I", value) + gguf_file[24:]
    else:
        at = gguf_file.index(name) + len(name)
        data = gguf_file[:at] + struct.pack("<I", value) + gguf_file[at + 4 :]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused(path, ".", ModelError)


@pytest.fixture(scope="module", autouse=True)
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write(make("llama", **SMALL), tmp_path_factory.mktemp("gguf") / "m.gguf", permuted=True)
    read_all(path)
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(4))
def test_damaged_gguf_files(seed: int, gguf_file: bytes, tmp_path: Path) -> None:
    source, seen = random.Random(seed), dict[str, int]()
    end = gguf_file.index(b"token_embd.weight") + 2000
    for _ in range(60):
        survives(tmp_path / "m.gguf", mutated(gguf_file, source, end), seen)
    assert seen["CorruptModel"] > 10
