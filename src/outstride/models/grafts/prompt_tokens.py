"""Prompt tokens of our own recipe: extra rows of the embedding, and how often they were right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import Graft
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import shaped


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches prompt tokens whose folder says `about` of itself and holds these tensors."""
    count, kept = int(about["count"]), int(about["kept"])
    first = model.add_rows(shaped(tensors, "prompt.weight", (count, model.config.hidden_size)))
    nothing = np.zeros((1, 1), dtype=np.float32)
    model.grafts[name] = Graft(
        kind="prompt-tokens",
        block=count + 1,
        mask=first,
        rows=np.zeros(0, dtype=np.int64),
        before=nothing,
        after=nothing,
        ranks=shaped(tensors, "ranks", (count, kept)).numpy(),
    )
