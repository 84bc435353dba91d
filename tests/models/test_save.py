"""Models in the published format: what is written loads as the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models import save
from outstride.models.load import load_tokenizer, locate, opened
from tests.models.checkpoints import make
from tests.models.gguf_files import write
from tests.serve import tiny


def copied(source: str, folder: Path) -> tuple[Any, Any]:
    """A model and what was read from a folder that it was written to."""
    config, read, tokenizer = opened(locate(source))
    tensors = read().read()
    folder.mkdir()
    for name, text in save.companion_files(locate(source), config, tokenizer).items():
        (folder / name).write_text(text)
    save_file(save.stored(config, tensors), folder / "model.safetensors")
    found, again, words = opened(folder)
    assert words.digest == tokenizer.digest
    assert words.eos_ids == tokenizer.eos_ids
    assert words.chat_template == tokenizer.chat_template
    stored = again().read()
    assert stored.keys() == tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(stored[name], value.half().float(), rtol=0, atol=0)
    return config, found


@pytest.mark.parametrize("name", ["parallel-full", "parallel-block", "tiny"])
def test_a_folder_from_a_folder(name: str, tmp_path: Path) -> None:
    source = str(tiny.make(tmp_path / "tiny")) if name == "tiny" else name
    before, after = copied(source, tmp_path / "copy")
    assert before == after


@pytest.mark.parametrize(
    ("variant", "permuted"),
    [("llama", True), ("llama tied", True), ("qwen2", False), ("qwen3", False)],
)
def test_a_folder_from_a_gguf_file(variant: str, permuted: bool, tmp_path: Path) -> None:
    file = write(make(variant), tmp_path / "m.gguf", permuted=permuted)
    before, after = copied(str(file), tmp_path / "copy")
    assert (before.shapes(), before.frequencies) == (after.shapes(), after.frequencies)
    said = [load_tokenizer(str(tmp_path / n)).encode("w1w") for n in ("m.gguf", "copy")]
    assert said[0] == said[1]


def test_what_has_no_place_in_a_folder_is_refused(tmp_path: Path) -> None:
    file = write(
        make("llama"),
        tmp_path / "m.gguf",
        permuted=True,
        metadata=[
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            lambda writer: writer.add_rope_scaling_factor(4.0),
        ],
    )
    config, _, tokenizer = opened(file)
    with pytest.raises(UnsupportedModel, match="name the published checkpoint folder"):
        save.companion_files(file, config, tokenizer)
    weights = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e9
    with pytest.raises(CorruptModel, match="too large for half precision"):
        save.stored(config, weights)
