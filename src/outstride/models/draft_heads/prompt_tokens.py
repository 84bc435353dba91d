"""Prompt tokens of our own recipe: extra embedding rows, and how often their candidates were right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.draft_heads import PromptTokensHead
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import shaped


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches prompt tokens with this config.json and these tensors."""
    count, ranks = int(about["count"]), int(about["kept"])
    first = model.add_rows(shaped(tensors, "prompt.weight", (count, model.config.hidden_size)))
    model.draft_heads[name] = PromptTokensHead(
        kind="prompt-tokens",
        block=count + 1,
        first_token=first,
        rank_accuracy=shaped(tensors, "ranks", (count, ranks)).numpy(),
    )
