"""Draft heads, LoRA adapters and trained filters from their folders: read, checked, attached to a
model.

One file for each format; `folder` has what they share. The keys of a folder's config.json and the
names of
its tensors are a file format: they stay as they are, whatever the code calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

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

About: TypeAlias = Mapping[str, Any]
Tensors: TypeAlias = Mapping[str, torch.Tensor]
Attach: TypeAlias = Callable[[str], None]
"""Attaches what was read, under a name."""


def _all_at_once(
    attach: Callable[[Decoder, str, About, Tensors], None],
) -> Callable[[Decoder, About, Tensors], Attach]:
    """For what needs no preparation: everything happens when it is attached."""
    return lambda model, about, tensors: lambda name: attach(model, name, about, tensors)


KINDS: dict[str, Callable[[Decoder, About, Tensors], Attach]] = {
    "block-drafter": block_drafter.read,
    "diffusion-adapter": _all_at_once(diffusion_adapter.attach),
    "heads": _all_at_once(heads.attach),
    "prompt-tokens": _all_at_once(prompt_tokens.attach),
    "unmask-filter": _all_at_once(unmask_filter.attach),
    "accept-head": _all_at_once(accept_head.attach),
    "judge": _all_at_once(accept_head.attach),
}
"""What reads the results of each of our training recipes."""


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
    """Attaches what is in a folder to a model, under a name; see `read`."""
    read(model, folder, vocabulary)(name)


def read(model: Decoder, folder: Path, vocabulary: str = "") -> Attach:
    """Reads a folder and converts its tensors; the result attaches them to the model.

    Reading changes nothing that a pass uses, so passes may run meanwhile; attaching does.
    vocabulary: names the model's vocabulary; a folder that was made for another one is refused.
    """
    if getattr(model, "whole_passes", False):
        raise UnsupportedModel(
            "the model runs through transformers as a whole, so it takes no draft heads, filters or "
            "adapters; use a method that needs none, such as auto"
        )
    about = read_config(folder)
    if "outstride" not in about:
        return published.read(model, folder, about)
    if about["outstride"] not in KINDS:
        raise UnsupportedModel(
            f"{folder} was made by {about['outstride']!r}; supported are {', '.join(KINDS)}"
        )
    check(model.config, about.get("target", {}), folder, vocabulary)
    with _complete(folder, about["outstride"]):
        attach = KINDS[about["outstride"]](model, about, read_tensors(folder))

    def attach_checked(name: str) -> None:
        with _complete(folder, about["outstride"]):
            attach(name)

    return attach_checked


@contextmanager
def _complete(folder: Path, kind: str) -> Iterator[None]:
    """Turns errors about what is missing into one that says what to do."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptModel(
            f"{folder} is not a complete {kind}: {error!r}; train it again, or copy it again"
        ) from error
