"""Weights that were converted to the native format are kept in the cache directory.

The next start reads them instead of the model file, which is several times faster. The file is
optional: loading goes on without it where it cannot be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outstride.errors import CorruptModel
from outstride.models.decoder import Decoder
from outstride.models.fetch import cache_dir
from outstride.ops.cpu import Cpu
from outstride.ops.cpu.weights import PackedModel

if TYPE_CHECKING:
    from outstride.core.contracts import MaskedSpec
    from outstride.models.config import DecoderConfig
    from outstride.models.load import ReadTensors
    from outstride.ops.contract import Ops
    from outstride.ops.weights import ModelWeights


def load_native(
    path: Path,
    config: DecoderConfig,
    read_tensors: ReadTensors,
    *,
    pages: int,
    page_size: int,
    features: tuple[int, ...],
    masking: MaskedSpec | None,
    bits: int,
) -> Decoder:
    """A decoder on the native kernels, from the kept file if it fits, else from the model file.

    The kept file names its source and has a checksum of every array. A file that does not match is
    written anew.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    about = {"source": f"{path.resolve()} {stats}", "config": repr(config), "checked": "finite"}
    name = hashlib.sha256(about["source"].encode()).hexdigest()[:16]
    kept = cache_dir() / "converted" / f"{path.stem}-{name}.int{bits}.safetensors"
    if kept.is_file():
        try:
            weights, known = PackedModel.read(kept, config, about, bits)
            ops = Cpu(
                config, weights, slots=pages * page_size, page_size=page_size, features=features
            )
            digest = known["digest"]
            return Decoder(config, ops, digest, pages=pages, page_size=page_size, masking=masking)
        except CorruptModel:
            kept.unlink(missing_ok=True)
    converted: list[PackedModel] = []

    def convert(model: ModelWeights) -> Ops:
        converted.append(PackedModel.pack(model, bits))
        return Cpu(config, converted[0], slots=model.slots, page_size=page_size, features=features)

    decoder = Decoder.from_tensors(
        config,
        read_tensors(),
        pages=pages,
        page_size=page_size,
        features=features,
        make_ops=convert,
        masking=masking,
    )
    _keep(converted[0], kept, {**about, "digest": decoder.digest})
    return decoder


def _keep(weights: PackedModel, kept: Path, about: dict[str, str]) -> None:
    """Writes the file; a warning if that fails, for example because the disk is full."""
    from safetensors import SafetensorError

    try:
        weights.write(kept, about)
    except (OSError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(
            f"warning: the converted weights cannot be kept in {kept.parent} ({reason}); the next "
            "start converts them again. Free some space, or set OUTSTRIDE_CACHE to another folder",
            file=sys.stderr,
            flush=True,
        )
        with contextlib.suppress(OSError):
            kept.with_suffix(".part").unlink(missing_ok=True)
