"""Names of models: what they stand for, and what is said if they stand for nothing."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from outstride.errors import CorruptModel, DownloadFailed, ModelNotFound, UnsupportedModel
from outstride.models import load as loading
from outstride.models.choose_weights import Placement
from outstride.models.load import aliases, default_pages, load, locate
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from tests.models.checkpoints import make, save
from tests.models.drive import random_decoder, tiny


def test_aliases() -> None:
    assert aliases() == ["parallel-block", "parallel-full", "smollm2"]


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean 'smollm2'.*GGUF"):
        load("smollm")
    with pytest.raises(ModelNotFound, match="smollm2"):
        load("zzz")


@pytest.mark.parametrize("name", ["./nothing", "/no/such/model.gguf", "nothing.gguf", "~/nothing"])
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no file or folder"):
        load(name)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="pickled"):
        load(str(tmp_path / "m.bin"))
    (tmp_path / "m.txt").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="neither"):
        load(str(tmp_path / "m.txt"))


def test_hub_ids_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make("llama"), tmp_path)
    asked = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options.get("local_files_only", False)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate("org/name") == folder
    assert asked == [("org/name", True)]


def test_hub_ids_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):
        """HTTP libraries have errors of their own, which are no OSError."""

    def repo_info(*_: Any, **__: Any) -> None:
        raise Unreachable("Cannot reach the hub.")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    with pytest.raises(DownloadFailed, match=r"Cannot reach the hub.*hf download org/name"):
        load("org/name")


class Small(Reference):
    """A backend on which memory is what a test says."""

    memory = 10**12

    @classmethod
    def free_memory(cls) -> int:
        return cls.memory


def test_default_size_of_the_kv_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "backend_of", lambda chosen: Small)
    cpu = Placement("cpu", "fp32")
    assert default_pages(tiny(context=512), cpu) == 2 * 512 // 16
    assert default_pages(tiny(context=10_000), cpu) == 16_384 // 16
    assert default_pages(tiny(context=100_000), cpu) == 100_000 // 16
    assert not capsys.readouterr().err
    config = tiny(context=100_000)
    weights = 4 * loading.weight_count(config)
    per_token = Reference.kv_bytes_per_token(config)
    monkeypatch.setattr(Small, "memory", weights + 10 * 640 * per_token)
    assert default_pages(config, cpu) == 6 * 640 // 16
    assert "KV cache of 3,840 tokens" in capsys.readouterr().err
    monkeypatch.setattr(Small, "memory", weights // 2)
    assert default_pages(config, cpu) == 1


def test_bytes_of_the_kv_cache() -> None:
    config = tiny(layers=3, kv_heads=2, head_dim=16)
    model = random_decoder(config, pages=8)
    ops = model.ops
    assert isinstance(ops, Reference)
    tensors = [*ops.cache.keys, *ops.cache.values]
    stored = sum(t.numel() * t.element_size() for t in tensors)
    assert Reference.kv_bytes_per_token(config) == stored // (8 * 16)
    if native.library_path() is not None:
        kernels = random_decoder(config, pages=8, make_ops=Cpu.of).ops
        assert isinstance(kernels, Cpu)
        stored = sum(a.size for a in (*kernels.runtime.keys, *kernels.runtime.values))
        assert Cpu.kv_bytes_per_token(config) == stored // (8 * 16)
        assert Cpu.kv_bytes_per_token(config) < Reference.kv_bytes_per_token(config)


def test_importing_the_loader_is_light() -> None:
    heavy = "torch", "transformers", "tokenizers", "gguf", "huggingface_hub"
    code = f"import sys, outstride.models.load; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- files that are not as they should be ---------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes: every larger write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(native.library_path() is None, reason="no native kernels were built")
def test_a_full_disk_does_not_keep_a_model_from_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(make("llama"), tmp_path / "model")
    cache = tmp_path / "cache"
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(cache))
    with full_disk():
        found = load(str(folder), pages=4, weights="int8")
    assert found.weights == "int8"
    said = capsys.readouterr().err
    assert "warning: the converted weights cannot be kept" in said
    assert str(cache) in said
    assert not [file for file in cache.rglob("*") if file.is_file()]
    load(str(folder), pages=4, weights="int8")
    assert "warning" not in capsys.readouterr().err
    assert [file for file in cache.rglob("*.safetensors") if file.is_file()]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weights", ["fp32", "auto"])
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, weights: str
) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))
    model = make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = value
    folder = save(model, tmp_path / "model")
    with pytest.raises(CorruptModel, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*NaN"):
        load(str(folder), pages=4, weights=weights)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_next_to_a_model_is_not_ignored_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = save(make("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load(str(folder), pages=4, weights="fp32")
    assert "adapter" not in capsys.readouterr().err
    (folder / name).write_bytes(b"{}")
    load(str(folder), pages=4, weights="fp32")
    said = capsys.readouterr().err
    assert str(folder / name) in said
    assert "--adapter NAME=" in said
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=f"{name}.*--adapter NAME="):
        load(str(folder), pages=4, weights="fp32")
