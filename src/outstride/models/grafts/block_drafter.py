"""Block-drafters of our own recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import Graft
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import layer, shaped
from outstride.ops.contract import GraftWeights


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches a block-drafter whose folder says `about` of itself and holds these tensors."""
    known, taps = model.config, tuple(map(int, about["taps"]))
    listed = tensors["vocabulary"].numpy().astype(np.int64)
    rows = np.full(known.vocab_size, len(listed), dtype=np.int64)
    rows[listed] = np.arange(len(listed))  # an id that does not exist is an IndexError
    mask = model.add_rows(shaped(tensors, "mask.weight", (1, known.hidden_size)))
    size, wide = known.hidden_size, len(taps) * known.hidden_size
    rank = tensors["follow.after.weight"].shape[1]
    graft = Graft(
        kind=about["outstride"],
        block=int(about["block"]),
        mask=mask,
        rows=rows,
        before=shaped(tensors, "follow.before.weight", (len(listed) + 1, rank)).numpy(),
        after=shaped(tensors, "follow.after.weight", (len(listed), rank)).numpy(),
    )
    model.attach(
        name,
        graft,
        GraftWeights(
            taps=taps,
            scale=shaped(tensors, "taps.scale", (wide,)),
            mix=shaped(tensors, "fc.weight", (size, wide)),
            mixed=shaped(tensors, "hidden_norm.weight", (size,)),
            layers=[layer(tensors, f"layers.{i}.", known) for i in range(int(about["layers"]))],
            norm=shaped(tensors, "norm.weight", (size,)),
            vocabulary=listed,
            window=about.get("window"),
            before=graft.before,
            after=graft.after,
        ),
    )
