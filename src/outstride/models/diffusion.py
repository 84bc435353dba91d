"""`Diffusion`: the conventions of masked (diffusion) models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outstride.core.contracts import CAUSAL, FULL, AttentionPattern, MaskedSpec
from outstride.errors import CorruptModel, UnsupportedModel

if TYPE_CHECKING:
    from outstride.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Diffusion:
    """The conventions of a model that fills in masks.

    mask: the id of the mask token, where the config states it; else the tokenizer has it.
    block: the number of positions that attend to each other; None: all.
    shifted, causal: as in `core.contracts.MaskedSpec`.
    """

    block: int | None = None
    shifted: bool = False
    causal: bool = False
    mask: int | None = None

    @property
    def attention_pattern(self) -> AttentionPattern:
        return FULL if self.block is None else AttentionPattern(self.block)


_BLOCK = ("block_size", "bd_size", "block_length")
"""The keys under which configs state the block length."""


def read_diffusion(config: Mapping[str, Any], known: Diffusion | None) -> Diffusion | None:
    """The conventions of a family, with the block length and the mask that the config states."""
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


def attention_pattern_of(diffusion: Diffusion | None) -> AttentionPattern:
    """Which settled tokens attend to each other."""
    return CAUSAL if diffusion is None else diffusion.attention_pattern


def masked_spec_of(
    diffusion: Diffusion | None, tokenizer: Tokenizer, vocab_size: int
) -> MaskedSpec | None:
    """The conventions with the id of the mask token, from the config or else from the tokenizer."""
    if diffusion is None:
        return None
    token = tokenizer.mask_id if diffusion.mask is None else diffusion.mask
    if token is None:
        raise UnsupportedModel(
            "this is a masked model, but nothing names its mask token: state mask_token_id in "
            "config.json, or mask_token in tokenizer_config.json"
        )
    if not 0 <= token < vocab_size:
        raise CorruptModel(f"the mask token {token} is none of the {vocab_size} of the model")
    return MaskedSpec(
        token=token, block=diffusion.block, shifted=diffusion.shifted, causal=diffusion.causal
    )
