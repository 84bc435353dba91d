"""`bridged`: loads a model that no native family runs, through transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from outstride.errors import UnknownArchitecture, UnsupportedModel
from outstride.models.bridge import TRUST_VARIABLE
from outstride.models.bridge.check import check
from outstride.models.bridge.open import context_of, layers_of, open_model
from outstride.models.bridge.ops import BridgeOps
from outstride.models.bridge.paged import kv_bytes_per_token
from outstride.models.bridge.probe import AttentionShape
from outstride.models.config import DecoderConfig, RopeConfig
from outstride.models.decoder import Decoder
from outstride.models.load import PAGE_SIZE, Loaded, affordable_pages
from outstride.models.tokenizer import Tokenizer
from outstride.models.weights import digest_of
from outstride.ops import host_memory


def bridged(
    unknown: UnknownArchitecture,
    name: str,
    path: Path,
    pages: int | None,
    features: tuple[int, ...],
    device: str,
    weights: str,
    trust_remote_code: bool,
) -> Loaded:
    """The model of a folder through transformers; a line on standard error says so.

    unknown: why no native family runs it. The other arguments are those of `models.load.load`. Raises
    UnsupportedModel, with both reasons, if it cannot run this way either.
    """
    if not path.is_dir():
        raise unknown
    trusted = trust_remote_code or os.environ.get(TRUST_VARIABLE, "") not in ("", "0")
    try:
        if device not in ("auto", "cpu") or weights not in ("auto", "fp32"):
            raise UnsupportedModel("through transformers it runs with device cpu and weights fp32")
        tokenizer = Tokenizer.from_folder(path)
        model = _decoder(path, pages, features, trusted)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{unknown}; {error}") from error
    context = min(model.context, model.pages * PAGE_SIZE)
    return Loaded(model, tokenizer, name, context, path)


def _decoder(
    path: Path, pages: int | None, features: tuple[int, ...], trust_remote_code: bool
) -> Decoder:
    """The decoder, checked; raises UnsupportedModel with the reason."""
    if features:
        raise UnsupportedModel("through transformers it gives no hidden states of layers")
    model = open_model(path, trust_remote_code=trust_remote_code)
    layers = layers_of(model)
    config = _described(model, layers)
    if pages is None:
        per_token = kv_bytes_per_token(layers)
        pages = affordable_pages(config.context, per_token, host_memory.available())
    ops = BridgeOps(model, layers, slots=pages * PAGE_SIZE, page_size=PAGE_SIZE)
    ops.row_invariant = check(model, layers)
    rounding = "" if ops.row_invariant else "; methods are exact up to rounding (`outstride prove`)"
    print(
        f"{config.architecture} has no native family: it runs through transformers, in fp32 on the "
        f"CPU{rounding}",
        file=sys.stderr,
        flush=True,
    )
    if not ops.row_invariant:
        ops.name += ", exact up to rounding"
    digest = digest_of(config, dict(model.named_parameters()))
    return Decoder(config, ops, digest, pages=pages, page_size=PAGE_SIZE)


def _described(model: Any, layers: list[AttentionShape]) -> DecoderConfig:
    """The sizes of a bridged model, as far as the engine and its users ask for them."""
    text = model.config.get_text_config(decoder=True)
    widest = max(layers, key=lambda layer: layer.kv_heads * layer.width)
    hidden = int(text.hidden_size)
    return DecoderConfig(
        architecture=type(model).__name__,
        vocab_size=int(text.vocab_size),
        hidden_size=hidden,
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        layers=len(layers),
        heads=widest.heads,
        kv_heads=widest.kv_heads,
        head_dim=widest.width + widest.width % 2,
        context=context_of(text),
        norm_eps=1e-5,
        rope=RopeConfig(),
        rope_layers=(True,) * len(layers),
        windows=tuple(layer.window for layer in layers),
    )
