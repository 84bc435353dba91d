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
from typing import TYPE_CHECKING, Any, TypeAlias

from outstride.errors import (
    CorruptModel,
    ModelNotFound,
    OutstrideError,
    UnknownArchitecture,
    UnsupportedModel,
)
from outstride.models.choose_weights import (
    BYTES,
    GGUF,
    GGUF_4BIT,
    SAFETENSORS,
    SAFETENSORS_4BIT,
    Placement,
    backend_of,
    place,
    placements,
)
from outstride.models.fetch import ALIASES, fetch, shipped
from outstride.models.gguf_split import only_model
from outstride.models.hub import hub_name, snapshot

if TYPE_CHECKING:
    from outstride.core.contracts import MaskedSpec
    from outstride.core.recurrent import StateSpec
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
_STATE_SHARE = 0.2
"""The share of the free memory that recurrent states may take."""
_MIN_STATES, _MAX_STATES = 4, 128
SNAPSHOT_TOKENS = 256
"""Prefix pages carry a snapshot of recurrent states at each multiple of this many tokens."""


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
    trust_remote_code: bool = False,
) -> Loaded:
    """Finds a model, downloads it if needed, checks it and loads it.

    pages: the size of the KV cache in pages of 16 tokens; by default it follows from the context
    length and the free memory of the device. features: layers whose input hidden states are stored
    with the KV cache. device, weights: see `choose_weights`; draft models take the same.
    trust_remote_code: whether transformers may run Python code of the repository, for architectures
    that neither have a native family nor are part of transformers.
    """
    from outstride.models.diffusion import masked_spec_of

    placements(device, weights)  # options that cannot be are refused before anything is downloaded
    path = locate(name)
    try:
        config, open_model, tokenizer = opened(path)
    except UnknownArchitecture as unknown:
        from outstride.models.bridge.load import bridged

        return bridged(unknown, name, path, pages, features, device, weights, trust_remote_code)
    # Weights are read meanwhile; the first answer would wait for it otherwise.
    threading.Thread(target=_prepare_chat, args=(tokenizer,), daemon=True).start()
    chosen = place(config, placements(device, weights, file_format_of(path, open_model)))
    masking = masked_spec_of(config.diffusion, tokenizer, config.vocab_size)
    if pages is None:
        pages = default_pages(config, chosen, features)
    config = config.limited(pages * PAGE_SIZE)
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
        from outstride.models.checkpoint import is_quantized

        if not is_quantized(path):
            return SAFETENSORS
    matrices = [
        tensor
        for name, tensor in open_model().tensors.items()
        if ".layers." in name and len(tensor.shape) == 2
    ]
    taken = sum(math.prod(m.shape) for m in matrices if m.block_kind is not None or m.has_codes)
    packed = 2 * taken > sum(math.prod(m.shape) for m in matrices)
    if path.is_dir():
        return SAFETENSORS_4BIT if packed else SAFETENSORS
    return GGUF_4BIT if packed else GGUF


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
    from outstride.models.conversion_progress import conversion_progress
    from outstride.models.decoder import Decoder
    from outstride.ops.reference import Reference

    make_ops: Callable[[ModelWeights], Ops] = backend_of(chosen)
    recurrent = config.switches.recurrent is not None
    if chosen.device == "cpu" and make_ops is not Reference and recurrent:
        from outstride.ops.cpu.packed_reference import PackedReference

        make_ops = partial(PackedReference, bits=int(chosen.weights.removeprefix("int")))
    elif chosen.device == "cpu" and make_ops is not Reference:
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
    with conversion_progress(path.stem, weight_count(config), "Reading", "") as progress:
        tensors, digest = stored.read(progress), stored.digest()
    return Decoder.from_tensors(
        config,
        tensors,
        pages=pages,
        page_size=PAGE_SIZE,
        features=features,
        make_ops=rounded_reference
        if chosen.weights == "int4" and make_ops is Reference
        else make_ops,
        masking=masking,
        digest=digest,
        states=default_states(config, chosen),
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
        return _tokenizer(path, Tokenizer.from_folder, path)
    from outstride.models.gguf_file import GgufFile

    return _tokenizer(path, Tokenizer.from_gguf, GgufFile(path).metadata)


def _tokenizer(path: Path, make: Callable[[Any], Tokenizer], source: Any) -> Tokenizer:
    """A tokenizer; whatever goes wrong while damaged files are read is an error of this package."""
    try:
        return make(source)
    except OutstrideError:
        raise
    except Exception as error:  # the library raises errors of no particular type
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CorruptModel(f"the tokenizer of {path} is damaged: {reason}") from error


def locate(name: str) -> Path:
    """The GGUF file or checkpoint folder that a name stands for; may download it."""
    if name in ALIASES:
        return fetch(name)
    if name in (here := shipped()):
        return here[name]
    path = Path(name).expanduser()
    if path.is_dir():
        only = only_model(path.glob("*.gguf"))
        return path if only is None or (path / "config.json").is_file() else only
    if path.is_file():
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            from outstride.models.safetensors_header import PICKLE

            raise UnsupportedModel(f"{path} holds pickled weights; {PICKLE}")
        if path.suffix != ".gguf":
            raise UnsupportedModel(
                f"{path} is neither a GGUF file nor a checkpoint folder (a folder with config.json and "
                "safetensors files)"
            )
        return path
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        raise ModelNotFound(f"there is no file or folder {name}")
    if (wanted := hub_name(name)) is not None:
        return snapshot(wanted)
    close = difflib.get_close_matches(name, aliases(), n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ModelNotFound(
        f"there is no model {name!r}: {hint}name one of {', '.join(aliases())}, a GGUF file, "
        "a checkpoint folder, or a hub id such as 'org/name' or 'org/name:Q4_K_M'"
    )


def default_pages(config: DecoderConfig, chosen: Placement, features: tuple[int, ...] = ()) -> int:
    """Pages of the KV cache: for two short contexts or one long one, as far as memory goes.

    The backend says how many bytes a token takes and how much memory is free on its device. The
    weights, which are not loaded yet, are subtracted.
    """
    backend = backend_of(chosen)
    per_token = backend.kv_bytes_per_token(config) + 4 * len(features) * config.hidden_size
    free = backend.free_memory() - int(weight_count(config) * BYTES[chosen.weights])
    return affordable_pages(config.context, per_token, free)


def affordable_pages(context: int, per_token: int, free: int) -> int:
    """Pages of a KV cache for a context length, with `free` bytes of memory and bytes per token."""
    tokens = max(context, min(2 * context, _CACHED_TOKENS))
    affordable = max(int(_CACHE_SHARE * free), 0) // max(per_token, 1)
    if affordable < context:
        print(
            f"warning: free memory allows a KV cache of {max(affordable, PAGE_SIZE):,} tokens, less "
            f"than the context length of {context:,}; longer requests are refused",
            file=sys.stderr,
            flush=True,
        )
    return max(min(tokens, affordable) // PAGE_SIZE, 1)


def default_states(config: DecoderConfig, chosen: Placement) -> StateSpec | None:
    """The state slots of a model with recurrent layers; None if it has none.

    They take a fixed share of the free memory, which the KV cache does not count on: at most one slot
    for each sequence of a batch and as many snapshots.
    """
    from outstride.core.recurrent import StateSpec

    shape = config.switches.recurrent
    if shape is None:
        return None
    free = backend_of(chosen).free_memory() - int(weight_count(config) * BYTES[chosen.weights])
    affordable = max(int(_STATE_SHARE * free), 0) // max(shape.state_bytes, 1)
    return StateSpec(min(max(affordable, _MIN_STATES), _MAX_STATES), SNAPSHOT_TOKENS)


def weight_count(config: DecoderConfig) -> int:
    """How many weights a model has."""
    return sum(math.prod(shape) for shape in config.shapes().values())


def opened(path: Path) -> tuple[DecoderConfig, OpenModel, Tokenizer]:
    """The config, a function that opens the weights, and the tokenizer of what `locate` found."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> tuple[DecoderConfig, OpenModel, Tokenizer]:
    from outstride.models.gguf_file import GgufFile
    from outstride.models.gguf_model import read_config, stored_model
    from outstride.models.tokenizer import Tokenizer

    file = GgufFile(path)
    config = read_config(file)
    tokenizer = _tokenizer(path, Tokenizer.from_gguf, file.metadata)
    file.metadata.clear()
    return config, partial(stored_model, file, config), tokenizer


def _from_folder(path: Path) -> tuple[DecoderConfig, OpenModel, Tokenizer]:
    from outstride.models.checkpoint import read_config, stored_model
    from outstride.models.tokenizer import Tokenizer

    config = read_config(path)
    tokenizer = _tokenizer(path, Tokenizer.from_folder, path)
    return config, partial(stored_model, path, config), tokenizer
