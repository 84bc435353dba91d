"""Draft heads, LoRA adapters and trained filters from their folders: read, checked, attached to a
model.

One file for each format; `folder` has what they share. The keys of a folder's config.json and the
names of
its tensors are a file format: they stay as they are, whatever the code calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import DecoderConfig
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import (
    accept_head,
    block_drafter,
    diffusion_adapter,
    heads,
    prompt_tokens,
    published,
    unmask_filter,
)
from outstride.models.draft_heads.folder import check, read_config, read_tensors

KINDS: dict[str, Callable[[Decoder, str, Mapping[str, Any], Mapping[str, torch.Tensor]], None]] = {
    "block-drafter": block_drafter.attach,
    "diffusion-adapter": diffusion_adapter.attach,
    "heads": heads.attach,
    "prompt-tokens": prompt_tokens.attach,
    "unmask-filter": unmask_filter.attach,
    "accept-head": accept_head.attach,
    "judge": accept_head.attach,
}
"""What attaches the results of each of our training recipes."""


def shipped(config: DecoderConfig, vocabulary: str, kind: str) -> Path | None:
    """The folder of this kind that comes with the package for such a model; None: there is none."""
    folders = Path(__file__).parent.parent / "shipped" / "draft_heads"
    for file in sorted(folders.glob("*/config.json")):
        about = read_config(file.parent)
        target = about.get("target", {})
        shape = {key: getattr(config, key) for key in ("hidden_size", "layers", "vocab_size")}
        fits = target | shape | {"vocabulary": vocabulary} == target
        if fits and about["outstride"] == kind:
            return file.parent
    return None


def attach(model: Decoder, name: str, folder: Path, vocabulary: str = "") -> None:
    """Attaches what is in a folder to a model, under a name.

    vocabulary: names the model's vocabulary; a folder that was made for another one is refused.
    """
    about = read_config(folder)
    if "outstride" not in about:
        published.attach(model, name, folder, about)
        return
    if about["outstride"] not in KINDS:
        raise UnsupportedModel(
            f"{folder} was made by {about['outstride']!r}; supported are {', '.join(KINDS)}"
        )
    check(model.config, about.get("target", {}), folder, vocabulary)
    try:
        KINDS[about["outstride"]](model, name, about, read_tensors(folder))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptModel(
            f"{folder} is not a complete {about['outstride']}: {error!r}; train it again, or copy it "
            "again"
        ) from error
