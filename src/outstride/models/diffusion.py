"""`Diffusion`: what a checkpoint says of the masks that it fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outstride.core.contracts import CAUSAL, FULL, Masking, Vision
from outstride.errors import CorruptModel, UnsupportedModel

if TYPE_CHECKING:
    from outstride.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Diffusion:
    """The conventions of a model that fills in masks.

    mask: the id of the mask, where the config names it; else the tokenizer knows it.
    block: positions that see each other; None: all.
    shifted, causal: as in `core.contracts.Masking`.
    """

    block: int | None = None
    shifted: bool = False
    causal: bool = False
    mask: int | None = None

    @property
    def vision(self) -> Vision:
        return FULL if self.block is None else Vision(self.block)


_CONVENTIONS = {
    "llada": Diffusion(),
    "lladamoe": Diffusion(),
    "Dream": Diffusion(shifted=True),
    "llada2_moe": Diffusion(block=32),
    "sdar": Diffusion(block=4, causal=True),
    "Fast_dLLM_Qwen": Diffusion(block=32, shifted=True, causal=True),
}
"""By architecture. A block length is the one that the published code uses if it is told none."""
_BLOCK = ("block_size", "bd_size", "block_length")
"""The names under which configs state their block length."""


def read_diffusion(config: Mapping[str, Any], architecture: str) -> Diffusion | None:
    """The conventions of an architecture, with what its config says of them."""
    known = _CONVENTIONS.get(architecture)
    if known is None:
        return None
    block = known.block
    if block is not None:
        stated = next((config[name] for name in _BLOCK if config.get(name) is not None), block)
        block = int(stated)
        if block < 1:
            raise CorruptModel(f"config.json states blocks of {block} positions")
    mask = config.get("mask_token_id")
    return replace(known, block=block, mask=None if mask is None else int(mask))


def vision_of(diffusion: Diffusion | None) -> Vision:
    """How a model sees tokens that are settled."""
    return CAUSAL if diffusion is None else diffusion.vision


def masking_of(
    diffusion: Diffusion | None, tokenizer: Tokenizer, vocab_size: int
) -> Masking | None:
    """The conventions with the id of the mask, from the config or else from the tokenizer."""
    if diffusion is None:
        return None
    token = tokenizer.mask_id if diffusion.mask is None else diffusion.mask
    if token is None:
        raise UnsupportedModel(
            "this model fills in masks, but nothing names its mask token: state mask_token_id in "
            "config.json, or mask_token in tokenizer_config.json"
        )
    if not 0 <= token < vocab_size:
        raise CorruptModel(f"the mask token {token} is none of the {vocab_size} of the model")
    return Masking(
        token=token, block=diffusion.block, shifted=diffusion.shifted, causal=diffusion.causal
    )
