"""Names of models: what they stand for, and what is said if they stand for nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from outstride.cli.context import add_model_options
from outstride.errors import DownloadFailed, InvalidParams, ModelNotFound, UnsupportedModel
from outstride.models import load as loading
from outstride.models.load import aliases, choose_weights, default_pages, load, locate
from tests.models.checkpoints import make, save
from tests.models.drive import tiny


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
    with pytest.raises(UnsupportedModel, match="neither"):
        load(str(tmp_path / "m.bin"))


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
    def snapshot(_: str, **__: Any) -> str:
        raise LocalEntryNotFoundError("Cannot reach the hub.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(DownloadFailed, match="Cannot reach the hub"):
        load("org/name")


def test_room_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_free_memory", lambda: 10**12)
    assert default_pages(tiny(context=512)) == 2 * 512 // 16
    assert default_pages(tiny(context=10_000)) == 16_384 // 16
    assert default_pages(tiny(context=100_000)) == 100_000 // 16
    monkeypatch.setattr(loading, "_free_memory", lambda: 10**6)
    assert 1 <= default_pages(tiny(context=100_000)) < 100


def test_importing_the_loader_is_light() -> None:
    heavy = "torch", "transformers", "tokenizers", "gguf", "huggingface_hub"
    code = f"import sys, outstride.models.load; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_offers_the_same_formats() -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    for weights in loading.WEIGHTS:
        assert parser.parse_args(["--weights", weights]).weights == weights
    with pytest.raises(SystemExit):
        parser.parse_args(["--weights", "fp8"])


def test_weights_formats_that_are_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParams, match="fp32, bf16"):
        load("smollm2", weights="fp8")
    monkeypatch.setattr("outstride.ops.cuda.available", lambda: False)
    with pytest.raises(UnsupportedModel, match="NVIDIA card"):
        load("smollm2", weights="bf16")
    monkeypatch.setattr("outstride.ops.cpu.native.library_path", lambda: None)
    with pytest.raises(UnsupportedModel, match="compiler"):
        load("smollm2", weights="int8")
    assert choose_weights("auto") == choose_weights("fp32") == "fp32"
