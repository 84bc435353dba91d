"""`load`: a model and its tokenizer from an alias, a GGUF file, a checkpoint folder or a hub id."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from outstride.errors import (
    CorruptModel,
    DownloadFailed,
    InvalidParams,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from outstride.models.fetch import ALIASES, cache_dir, fetch, shipped

if TYPE_CHECKING:
    import torch

    from outstride.core.contracts import Masking
    from outstride.models.config import DecoderConfig
    from outstride.models.decoder import Decoder
    from outstride.models.tokenizer import Tokenizer
    from outstride.ops.contract import Model, Ops

    ReadTensors: TypeAlias = Callable[[], dict[str, torch.Tensor]]

WEIGHTS = ("auto", "int8", "int4", "fp32", "bf16")
"""Formats that a pass can compute in."""
_BITS = {"int8": 8, "int4": 4}
"""Formats of the native kernels, and the bits of a layer's weights."""
PAGE_SIZE = 16
_POOL = 16_384
"""Tokens for which the cache has room by default, if two whole contexts are more."""
_SHARE = 0.6
"""Of the free memory, what the cache may come to take."""
_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "merges.txt"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run.

    context: how long a sequence may become: the model's own limit, or the cache's if that is less.
    """

    model: Decoder
    tokenizer: Tokenizer
    name: str
    context: int
    path: Path


def aliases() -> list[str]:
    """Names that need no path."""
    return sorted([*ALIASES, *shipped()])


def load(
    name: str,
    *,
    pages: int | None = None,
    features: tuple[int, ...] = (),
    weights: str = "auto",
) -> Loaded:
    """Finds, fetches if need be, checks and loads a model.

    weights: the format to compute in, `int8` or `int4` (native CPU kernels; int4 in groups of 32,
    the head in int8), `fp32` (torch, the reference) or `bf16` (an NVIDIA card); `auto` takes int8
    where the kernels were built and know the model's layers, and says so where it does not.
    """
    from outstride.models.diffusion import masking_of

    chosen = choose_weights(weights)
    path = locate(name)
    config, read_tensors, tokenizer = opened(path)
    chosen = _if_it_can(chosen, config, asked=weights != "auto")
    masking = masking_of(config.diffusion, tokenizer, config.vocab_size)
    if pages is None:
        pages = default_pages(config, features)
    if chosen in _BITS and _built():
        model = _converted(path, config, read_tensors, pages, features, masking, _BITS[chosen])
    else:
        from outstride.models.decoder import Decoder

        model = Decoder.from_tensors(
            config,
            read_tensors(),
            pages=pages,
            page_size=PAGE_SIZE,
            features=features,
            make_ops=_reference_or_card(chosen),
            masking=masking,
        )
    context = min(config.context, pages * PAGE_SIZE)
    return Loaded(model=model, tokenizer=tokenizer, name=name, context=context, path=path)


def _converted(
    path: Path,
    config: DecoderConfig,
    read_tensors: ReadTensors,
    pages: int,
    features: tuple[int, ...],
    masking: Masking | None,
    bits: int,
) -> Decoder:
    """A decoder on native kernels; its converted weights are kept, so that the next start is short.

    The kept file says what it was made from and has a checksum of every array. One that does not
    match is made anew; one that cannot be written is done without.
    """
    from outstride.models.decoder import Decoder
    from outstride.ops.cpu import Cpu
    from outstride.ops.cpu.weights import Weights

    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    about = {"source": f"{path.resolve()} {stats}", "config": repr(config)}
    name = hashlib.sha256(about["source"].encode()).hexdigest()[:16]
    kept = cache_dir() / "converted" / f"{path.stem}-{name}.int{bits}.safetensors"

    def made(weights: Weights, digest: str) -> Decoder:
        ops = Cpu(config, weights, slots=pages * PAGE_SIZE, page_size=PAGE_SIZE, features=features)
        return Decoder(config, ops, digest, pages=pages, page_size=PAGE_SIZE, masking=masking)

    if kept.is_file():
        try:
            weights, known = Weights.read(kept, config, about, bits)
            return made(weights, known["digest"])
        except CorruptModel:
            kept.unlink(missing_ok=True)
    packed: list[Weights] = []

    def pack(model: Model) -> Ops:
        packed.append(Weights.pack(model, bits))
        return Cpu(config, packed[0], slots=model.slots, page_size=PAGE_SIZE, features=features)

    decoder = Decoder.from_tensors(
        config,
        read_tensors(),
        pages=pages,
        page_size=PAGE_SIZE,
        features=features,
        make_ops=pack,
        masking=masking,
    )
    with contextlib.suppress(OSError):
        packed[0].write(kept, {**about, "digest": decoder.digest})
    return decoder


def _if_it_can(weights: str, config: DecoderConfig, *, asked: bool) -> str:
    """The format to compute in, if its operations know all that this model's layers do."""
    if weights == "fp32" or config.plain:
        return weights
    if asked:
        raise UnsupportedModel(
            f"{weights} operations cannot run the layers of {config.architecture} models yet; "
            "use weights fp32 or auto"
        )
    print(
        f"the layers of {config.architecture} models run on torch in fp32 so far", file=sys.stderr
    )
    return "fp32"


def _reference_or_card(weights: str) -> Callable[[Model], Ops]:
    if weights == "bf16":
        from outstride.ops.cuda import Cuda

        return Cuda
    from outstride.ops.reference import Reference

    return _reference_of_groups if weights == "int4" else Reference


def _reference_of_groups(model: Model) -> Ops:
    """Where there are no kernels: weights rounded to int4, computed with in fp32."""
    from outstride.ops.cpu.groups import round_layer
    from outstride.ops.reference import Reference

    for layer in model.layers:
        round_layer(layer)
    ops = Reference(model)
    ops.name += ", layers rounded to int4"
    return ops


def _built() -> bool:
    from outstride.ops.cpu import native

    return native.library_path() is not None


def choose_weights(weights: str) -> str:
    """The format to compute in, if this machine can."""
    if weights not in WEIGHTS:
        raise InvalidParams(f"weights are {', '.join(WEIGHTS)}; not {weights!r}")
    built = _built()
    if weights == "int8" and not built:
        raise UnsupportedModel(
            "int8 weights need the native kernels, which were not built when Outstride was installed;"
            " install a C++ compiler and install again, or use weights fp32"
        )
    if weights == "bf16":
        from outstride.ops.cuda import available

        if not available():
            raise UnsupportedModel(
                "bf16 weights need an NVIDIA card that torch can see, and Triton; "
                "on a CPU use weights int8, int4 or fp32"
            )
    if weights == "int4" and not built:
        print(
            "no native kernels were built: int4 weights take the memory and time of fp32",
            file=sys.stderr,
        )
    if weights != "auto":
        return weights
    if not built:
        print("no native kernels were built: passes run on torch in fp32", file=sys.stderr)
    return "int8" if built else "fp32"


def load_tokenizer(name: str) -> Tokenizer:
    """Only the tokenizer, without reading any weights."""
    from outstride.models.tokenizer import Tokenizer

    path = locate(name)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    from outstride.models.gguf_file import GgufFile

    return Tokenizer.from_gguf(GgufFile(path).metadata)


def locate(name: str) -> Path:
    """The GGUF file or checkpoint folder that a name stands for."""
    if name in ALIASES:
        return fetch(name)
    if name in (here := shipped()):
        return here[name]
    path = Path(name).expanduser()
    if path.is_dir():
        packed = sorted(path.glob("*.gguf"))
        if len(packed) == 1 and not (path / "config.json").is_file():
            return packed[0]
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"{path} is neither a GGUF file nor a checkpoint folder")
        return path
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        raise ModelNotFound(f"there is no file or folder {name}")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    close = difflib.get_close_matches(name, aliases(), n=1, cutoff=0.4)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise ModelNotFound(
        f"there is no model {name!r}: {guess}name one of {', '.join(aliases())}, a GGUF file, "
        "a checkpoint folder, or a hub id such as 'org/name'"
    )


def default_pages(config: DecoderConfig, features: tuple[int, ...] = ()) -> int:
    """Room for two contexts if they are short, for one in any case, as far as memory goes."""
    tokens = max(config.context, min(2 * config.context, _POOL))
    per_token = 4 * config.layers * config.kv_heads * (2 * config.head_dim + 4)
    per_token += 4 * len(features) * config.hidden_size
    affordable = int(_SHARE * _free_memory()) // per_token
    return max(min(tokens, affordable) // PAGE_SIZE, 1)


def _free_memory() -> int:
    """Bytes that can be had without pushing other processes out."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def opened(path: Path) -> tuple[DecoderConfig, ReadTensors, Tokenizer]:
    """What stands in a file or folder that `locate` found; its weights are yet to be read."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> tuple[DecoderConfig, ReadTensors, Tokenizer]:
    from outstride.models.gguf_file import GgufFile, read_config, read_tensors
    from outstride.models.tokenizer import Tokenizer

    file = GgufFile(path)
    config = read_config(file)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    file.metadata.clear()
    return config, partial(read_tensors, file, config), tokenizer


def _from_folder(path: Path) -> tuple[DecoderConfig, ReadTensors, Tokenizer]:
    from outstride.models.checkpoint import read_config, read_tensors
    from outstride.models.tokenizer import Tokenizer

    config = read_config(path)
    tokenizer = Tokenizer.from_folder(path)
    return config, partial(read_tensors, path, config), tokenizer


def _from_hub(name: str) -> Path:
    """A snapshot of a hub repository; a whole one that is here already needs no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        here = Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
        if _whole(here):
            return here
    except (LocalEntryNotFoundError, ValueError, OSError):
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{name!r} is open only to users who accepted its terms; log in to the hub first"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"the hub has no model {name!r} (or it is private)") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise DownloadFailed(
            f"{name!r} is not here and could not be downloaded: {_first_line(error)}. What has "
            "arrived is kept; try again, or name a local file or folder"
        ) from error


def _whole(folder: Path) -> bool:
    from outstride.models.checkpoint import weight_files

    try:
        return (folder / "config.json").is_file() and bool(weight_files(folder))
    except ModelError:
        return False


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
