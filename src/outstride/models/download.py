"""`download`: one file by HTTP, continued from where an earlier attempt ended, checked at its end."""

from __future__ import annotations

import fcntl
import hashlib
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import IO, BinaryIO, cast

from outstride.models.conversion_progress import conversion_progress

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


def download(url: str, target: Path, size: int, name: str) -> None:
    """Downloads a file of known size. target: its path, which ends in its checksum if that is known.

    What arrives is kept in `target` with the suffix `.partial`; the next attempt, also of another
    process, asks for the rest only. A file with the wrong checksum is removed, and an OSError says so.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may be downloading the same file
        if target.exists():
            return
        _rest(url, file, size, name)
        file.flush()
        if _SHA256.fullmatch(target.name) and _checksum(file) != target.name:
            partial.unlink(missing_ok=True)
            raise OSError(f"{name} arrived with the wrong checksum and was removed")
        partial.replace(target)


def _rest(url: str, file: IO[bytes], size: int, name: str) -> None:
    """Everything after what the file already holds, with progress on standard error."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    file.seek(0, 2)
    if file.tell() > size:
        file.truncate(0)
        file.seek(0)
    # The library shows a bar on a terminal only.
    lines = None if sys.stderr.isatty() else conversion_progress(name, size, "Downloading", "")
    with lines or nullcontext() as progress:
        if progress is not None:
            progress(file.tell())
        http_get(
            url,
            cast("BinaryIO", _CountedFile(file, progress)),
            resume_size=file.tell(),
            headers=build_hf_headers(),
            expected_size=size,
            displayed_filename=name,
        )


class _CountedFile:
    """A file that reports how many bytes are written to it."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], None] | None) -> None:
        self._file, self._progress = file, progress
        self.seek, self.tell, self.truncate = file.seek, file.tell, file.truncate

    def write(self, data: bytes) -> int:
        if self._progress is not None:
            self._progress(len(data))
        return self._file.write(data)


def _checksum(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
