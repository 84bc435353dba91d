"""Checkpoints from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from outstride.errors import DownloadFailed, ModelError, ModelNotFound

_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "merges.txt"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `org/name`."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(name: str) -> Path:
    """The folder of a hub repository; a complete one that is cached needs no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        cached = Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
        if _complete(cached):
            return cached
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
            f"{name!r} is not cached and could not be downloaded: {_first_line(error)}. Files that "
            "have arrived are kept; try again, or name a local file or folder"
        ) from error


def _complete(folder: Path) -> bool:
    from outstride.models.checkpoint import weight_files

    try:
        return (folder / "config.json").is_file() and bool(weight_files(folder))
    except ModelError:
        return False


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
