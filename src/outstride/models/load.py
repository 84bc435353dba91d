"""`load`: a model and its tokenizer from an alias, a GGUF file, a checkpoint folder or a hub id."""

from __future__ import annotations

import difflib
import math
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from outstride.errors import ModelNotFound, UnsupportedModel
from outstride.models.choose_weights import (
    BYTES,
    GGUF,
    GGUF_4BIT,
    SAFETENSORS,
    Placement,
    backend_of,
    place,
    placements,
)
from outstride.models.fetch import ALIASES, fetch, shipped
from outstride.models.hub import is_hub_id, snapshot

if TYPE_CHECKING:
    from outstride.core.contracts import MaskedSpec
    from outstride.models.config import DecoderConfig
    from outstride.models.decoder import Decoder
    from outstride.models.stored import StoredModel
    from outstride.models.tokenizer import Tokenizer
    from outstride.ops.contract import Ops
    from outstride.ops.weights import ModelWeights

    OpenModel: TypeAlias = Callable[[], StoredModel]

PAGE_SIZE = 16
_CACHED_TOKENS = 16_384
"""Tokens that the KV cache holds by default, where two whole contexts are more."""
_CACHE_SHARE = 0.6
"""The share of the free memory that the KV cache may take."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run.

    context: the length that a sequence may reach: the model's own limit, or the size of the KV cache
    if that is less. device, weights: what `auto` decided.
    """

    model: Decoder
    tokenizer: Tokenizer
    name: str
    context: int
    path: Path
    device: str = "cpu"
    weights: str = "fp32"


def aliases() -> list[str]:
    """Names that need no path."""
    return sorted([*ALIASES, *shipped()])


def load(
    name: str,
    *,
    pages: int | None = None,
    features: tuple[int, ...] = (),
    device: str = "auto",
    weights: str = "auto",
) -> Loaded:
    """Finds a model, downloads it if needed, checks it and loads it.

    pages: the size of the KV cache in pages of 16 tokens; by default it follows from the context
    length and the free memory of the device. features: layers whose input hidden states are stored
    with the KV cache. device, weights: see `choose_weights`; draft models take the same.
    """
    from outstride.models.diffusion import masked_spec_of

    placements(device, weights)  # options that cannot be are refused before anything is downloaded
    path = locate(name)
    config, open_model, tokenizer = opened(path)
    # Weights are read meanwhile; the first answer would wait for it otherwise.
    threading.Thread(target=_prepare_chat, args=(tokenizer,), daemon=True).start()
    chosen = place(config, placements(device, weights, file_format_of(path, open_model)))
    masking = masked_spec_of(config.diffusion, tokenizer, config.vocab_size)
    if pages is None:
        pages = default_pages(config, chosen, features)
    model = _decoder(path, config, open_model, chosen, pages, features, masking)
    context = min(config.context, pages * PAGE_SIZE)
    return Loaded(model, tokenizer, name, context, path, model.ops.device, model.ops.weights)


def _prepare_chat(tokenizer: Tokenizer) -> None:
    """Works out what the first chat needs: the tokenizer's digest, and the compiled chat template."""
    _ = tokenizer.digest
    if tokenizer.chat_template is not None:
        with suppress(Exception):  # the first chat reports what is wrong with it
            tokenizer.chat([{"role": "user", "content": "?"}])


def file_format_of(path: Path, open_model: OpenModel) -> str:
    """The format of a model file, as AUTO_WEIGHTS names it."""
    if path.is_dir():
        return SAFETENSORS
    kinds = {
        tensor.block_kind
        for name, tensor in open_model().tensors.items()
        if ".layers." in name and len(tensor.shape) == 2
    }
    return GGUF_4BIT if kinds <= {"Q4_0", "Q4_1"} else GGUF


def _decoder(
    path: Path,
    config: DecoderConfig,
    open_model: OpenModel,
    chosen: Placement,
    pages: int,
    features: tuple[int, ...],
    masking: MaskedSpec | None,
) -> Decoder:
    """The decoder on the backend of a placement."""
    from outstride.models.decoder import Decoder
    from outstride.ops.reference import Reference

    make_ops: Callable[[ModelWeights], Ops] = backend_of(chosen)
    if chosen.device == "cpu" and make_ops is not Reference:
        from outstride.models.converted import load_native

        return load_native(
            path,
            config,
            open_model,
            pages=pages,
            page_size=PAGE_SIZE,
            features=features,
            masking=masking,
            bits=int(chosen.weights.removeprefix("int")),
        )
    stored = open_model()
    return Decoder.from_tensors(
        config,
        stored.read(),
        pages=pages,
        page_size=PAGE_SIZE,
        features=features,
        make_ops=rounded_reference if chosen.weights == "int4" else make_ops,
        masking=masking,
        digest=stored.digest(),
    )


def rounded_reference(model: ModelWeights) -> Ops:
    """For machines without native kernels: weights rounded to int4, computation in fp32."""
    from outstride.ops.cpu.int4 import quantize_layer
    from outstride.ops.reference import Reference

    for layer in model.layers:
        quantize_layer(layer)
    ops = Reference(model)
    ops.name += ", layers rounded to int4"
    ops.weights = "int4"
    return ops


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer alone, without reading any weights."""
    from outstride.models.tokenizer import Tokenizer

    path = locate(name)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    from outstride.models.gguf_file import GgufFile

    return Tokenizer.from_gguf(GgufFile(path).metadata)


def locate(name: str) -> Path:
    """The GGUF file or checkpoint folder that a name stands for; may download it."""
    if name in ALIASES:
        return fetch(name)
    if name in (here := shipped()):
        return here[name]
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1 and not (path / "config.json").is_file():
            return files[0]
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"{path} is neither a GGUF file nor a checkpoint folder")
        return path
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        raise ModelNotFound(f"there is no file or folder {name}")
    if is_hub_id(name):
        return snapshot(name)
    close = difflib.get_close_matches(name, aliases(), n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ModelNotFound(
        f"there is no model {name!r}: {hint}name one of {', '.join(aliases())}, a GGUF file, "
        "a checkpoint folder, or a hub id such as 'org/name'"
    )


def default_pages(config: DecoderConfig, chosen: Placement, features: tuple[int, ...] = ()) -> int:
    """Pages of the KV cache: for two short contexts or one long one, as far as memory goes.

    The backend says how many bytes a token takes and how much memory is free on its device. The
    weights, which are not loaded yet, are subtracted.
    """
    backend = backend_of(chosen)
    tokens = max(config.context, min(2 * config.context, _CACHED_TOKENS))
    per_token = backend.kv_bytes_per_token(config) + 4 * len(features) * config.hidden_size
    free = backend.free_memory() - int(weight_count(config) * BYTES[chosen.weights])
    affordable = max(int(_CACHE_SHARE * free), 0) // per_token
    if affordable < config.context:
        print(
            f"warning: free memory allows a KV cache of {max(affordable, PAGE_SIZE):,} tokens, less "
            f"than the context length of {config.context:,}; longer requests are refused",
            file=sys.stderr,
            flush=True,
        )
    return max(min(tokens, affordable) // PAGE_SIZE, 1)


def weight_count(config: DecoderConfig) -> int:
    """How many weights a model has."""
    return sum(math.prod(shape) for shape in config.shapes().values())


def opened(path: Path) -> tuple[DecoderConfig, OpenModel, Tokenizer]:
    """The config, a function that opens the weights, and the tokenizer of what `locate` found."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> tuple[DecoderConfig, OpenModel, Tokenizer]:
    from outstride.models.gguf_file import GgufFile, read_config, stored_model
    from outstride.models.tokenizer import Tokenizer

    file = GgufFile(path)
    config = read_config(file)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    file.metadata.clear()
    return config, partial(stored_model, file, config), tokenizer


def _from_folder(path: Path) -> tuple[DecoderConfig, OpenModel, Tokenizer]:
    from outstride.models.checkpoint import read_config, stored_model
    from outstride.models.tokenizer import Tokenizer

    config = read_config(path)
    tokenizer = Tokenizer.from_folder(path)
    return config, partial(stored_model, path, config), tokenizer
