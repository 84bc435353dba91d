"""GGUF models in several files: `name-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from outstride.errors import CorruptModel

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS = 9999
_PROJECTOR = "mmproj"
"""Is in the names of files with the vision part of a model."""


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model that a file is a part of, in order; an error names those missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 0 < int(found["number"]) <= count <= _MAX_PARTS:
        raise CorruptModel(f"{path} is named as part {found['number']} of {found['count']}")
    files = [
        path.with_name(f"{found['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        raise CorruptModel(
            f"{path} is one of {count} files of a model; get the others into {path.parent} as well: "
            f"{named}"
        )
    return files


def only_model(files: Iterable[Path]) -> Path | None:
    """The file to name for the one model among GGUF files; None if there is none, or several.

    Files of a vision part are ignored. Of a model in several files it is the first that is there.
    """
    models: dict[tuple[str, str], Path] = {}
    for file in sorted(files):
        if _PROJECTOR in file.name.lower():
            continue
        found = _PART.fullmatch(file.name)
        key = (found["stem"], found["count"]) if found else (file.name, "")
        models.setdefault(key, file)
    return next(iter(models.values())) if len(models) == 1 else None
