"""Weights that were converted to the native format are kept in the cache directory.

The next start reads them instead of the model file, which is several times faster. 4-bit codes that the
kernels take as they are stay in the model file and are repacked at every start, because that is as fast
as reading a copy. The kept file is optional: loading goes on without it where it cannot be written.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outstride.errors import CorruptModel
from outstride.models.config import described
from outstride.models.conversion_progress import conversion_progress
from outstride.models.decoder import Decoder
from outstride.models.fetch import cache_dir
from outstride.models.gguf_split import gguf_parts
from outstride.ops.cpu import Cpu
from outstride.ops.cpu.weights import PackedModel, repacked_matrices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outstride.core.contracts import MaskedSpec
    from outstride.models.config import DecoderConfig
    from outstride.models.load import OpenModel
    from outstride.models.stored import StoredModel
    from outstride.ops.matrix_rows import ModelRows


def load_native(
    path: Path,
    config: DecoderConfig,
    open_model: OpenModel,
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
    files = gguf_parts(path) if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    about = {
        "source": f"{path.resolve()} {stats}",
        "config": described(config),
        "checked": "finite",
    }
    name = hashlib.sha256(about["source"].encode()).hexdigest()[:16]
    kept = cache_dir() / "converted" / f"{path.stem}-{name}.int{bits}.safetensors"
    found = _read(kept, config, open_model, about, bits)
    weights, digest = found or _convert(path.stem, kept, config, open_model(), about, bits)
    ops = Cpu(config, weights, slots=pages * page_size, page_size=page_size, features=features)
    return Decoder(config, ops, digest, pages=pages, page_size=page_size, masking=masking)


def _read(
    kept: Path, config: DecoderConfig, open_model: OpenModel, about: Mapping[str, str], bits: int
) -> tuple[PackedModel, str] | None:
    """The weights of the kept file and their digest; None if there is none, or it does not fit.

    Where codes come from the model file, its digest is checked against the one of the conversion.
    """
    if not kept.is_file():
        return None
    try:
        rows: ModelRows | None = None
        digest = ""
        if bits == 4:
            stored = open_model()
            rows = stored.rows()
            digest = stored.digest() if repacked_matrices(rows, bits) else ""
        weights, known = PackedModel.read(kept, config, about, bits, rows)
        if digest and digest != known["digest"]:
            raise CorruptModel(f"{kept} was made from other weights")
        return weights, known["digest"]
    except CorruptModel:
        kept.unlink(missing_ok=True)
        return None


def _convert(
    name: str,
    kept: Path,
    config: DecoderConfig,
    stored: StoredModel,
    about: Mapping[str, str],
    bits: int,
) -> tuple[PackedModel, str]:
    """Converts the model file and keeps the result, with a warning if that fails."""
    total = sum(tensor.shape[0] * tensor.shape[-1] for tensor in stored.tensors.values())
    with conversion_progress(name, total) as progress:
        rows, digest = stored.rows(), stored.digest()
        weights = PackedModel.pack(config, rows, bits, progress)
        _keep(kept, weights, {**about, "digest": digest}, rows)
    return weights, digest


def _keep(kept: Path, weights: PackedModel, about: Mapping[str, str], rows: ModelRows) -> None:
    """Writes converted weights, with a warning if that fails."""
    try:
        weights.write(kept, about, rows)
    except OSError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(
            f"warning: the converted weights cannot be kept in {kept.parent} ({reason}); the next "
            "start converts them again. Free some space, or set OUTSTRIDE_CACHE to another folder",
            file=sys.stderr,
            flush=True,
        )
