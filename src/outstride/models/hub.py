"""Models from the Hugging Face hub: `org/name`, `org/name@revision`, `org/name:Q4_K_M`.

Files are in the hub's own cache (`HF_HUB_CACHE`), so that other programs find them too. Large ones are
downloaded by `download`, which continues a file that an earlier process began.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outstride.errors import DownloadFailed, ModelError, ModelNotFound

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

_PATTERNS = [
    "*.json",
    "*.jinja",
    "*.safetensors",
    "merges.txt",
    "tokenizer.model",
    "*.tiktoken",
    "*.py",
]
_UNUSED = ["original/*", "consolidated*", "onnx/*", "*/onnx/*", "openvino/*", "metal/*"]
"""Second copies of the weights in the formats of other programs."""
_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w][\w./-]*))?(?::(?P<kind>[\w.-]+))?"
)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_NOT_MODELS = ("mmproj", "imatrix", "mtp-", "vocab")
_LARGE = 8 << 20
"""Bytes from which a file is downloaded so that it can be continued."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, a branch, tag or commit of it, and a GGUF file of it by its quantization."""

    repo: str
    revision: str | None = None
    kind: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{at}" + (f":{self.kind}" if self.kind else "")


def hub_name(name: str) -> HubName | None:
    """What a name of the hub stands for; None: it does not have the form of one."""
    found = _NAME.fullmatch(name)
    return None if found is None else HubName(found["repo"], found["revision"], found["kind"])


def snapshot(name: HubName) -> Path:
    """The folder of a repository, or its GGUF file; what is cached completely needs no network."""
    if (cached := _cached(name)) is not None:
        return cached
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().repo_info(name.repo, revision=name.revision)
        tree: Any = HfApi().list_repo_tree(name.repo, revision=info.sha, recursive=True)
        files: dict[str, RepoFile] = {entry.path: entry for entry in tree if hasattr(entry, "size")}
        wanted = _wanted(name, files)
        _download_large(name.repo, str(info.sha), [files[path] for path in wanted])
        folder = Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted))
    except Exception as error:
        _explain(name, error)
    ggufs = [path for path in wanted if path.endswith(".gguf")]
    return folder / ggufs[0] if ggufs else folder


def _wanted(name: HubName, files: Iterable[str]) -> list[str]:
    """The files of a repository that are needed; the first of a split GGUF file comes first."""
    from fnmatch import fnmatch

    if name.kind is None:
        found = [
            path
            for path in files
            if any(fnmatch(path, pattern) for pattern in _PATTERNS)
            and not any(fnmatch(path, pattern) for pattern in _UNUSED)
        ]
        if any(path.endswith(".safetensors") for path in found):
            return sorted(found)
    return _gguf_files(name, files)


def _gguf_files(name: HubName, files: Iterable[str]) -> list[str]:
    """The GGUF file of a quantization, or the parts of it in order."""
    models: dict[str, list[str]] = {}
    for path in sorted(files):
        if path.endswith(".gguf") and not Path(path).name.lower().startswith(_NOT_MODELS):
            split = _SPLIT.fullmatch(path)
            models.setdefault(split["stem"] if split else path, []).append(path)
    if not models:
        raise ModelNotFound(f"the repository {name.repo!r} has neither safetensors nor GGUF files")
    kinds = {_kind_of(paths[0]): paths for paths in models.values()}
    if name.kind is None:
        if len(models) == 1:
            return _whole(name, next(iter(models.values())))
        raise ModelNotFound(
            f"{name.repo!r} has {len(models)} GGUF files: name one of {name}:KIND with "
            f"{', '.join(sorted(kinds))}"
        )
    found = [paths for kind, paths in kinds.items() if kind.lower() == name.kind.lower()]
    if not found:
        found = [
            paths
            for paths in models.values()
            if re.search(
                rf"(?i)(?<![a-z0-9]){re.escape(name.kind)}(?![a-z0-9_])", Path(paths[0]).name
            )
        ]
    if len(found) != 1:
        raise ModelNotFound(
            f"{name.repo!r} has {len(found) or 'no'} GGUF files {name.kind!r}; it has "
            f"{', '.join(sorted(kinds))}"
        )
    return _whole(name, found[0])


def _kind_of(path: str) -> str:
    """The quantization that the name of a GGUF file states; the name if it states none."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).stem)
    found = re.search(r"(?i)[-._]((?:ud-)?(?:i?q\d\w*|tq\d\w*|mxfp4\w*|bf16|f16|f32|fp16))$", stem)
    return found[1] if found else stem


def _whole(name: HubName, paths: list[str]) -> list[str]:
    """Paths, if they are all parts of a split file; an error if some are missing."""
    if (split := _SPLIT.fullmatch(paths[0])) and len(paths) != int(split["count"]):
        raise ModelNotFound(f"{name} has {len(paths)} of {int(split['count'])} parts of its file")
    return paths


def _cached(name: HubName) -> Path | None:
    """What is in the cache, if it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        patterns = _PATTERNS if name.kind is None else ["*.outstride-no-such-file"]
        folder = Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=patterns,
                ignore_patterns=_UNUSED,
                local_files_only=True,
            )
        )
        if name.kind is None and _complete(folder):
            return folder
        present = [str(p.relative_to(folder)) for p in folder.rglob("*.gguf") if p.is_file()]
        if present and (name.kind is not None or not any(folder.rglob("*.safetensors"))):
            return folder / _gguf_files(name, present)[0]
    except (LocalEntryNotFoundError, ModelNotFound, ValueError, OSError):
        pass
    return None


def _complete(folder: Path) -> bool:
    from outstride.models.checkpoint import weight_files

    try:
        return (folder / "config.json").is_file() and bool(weight_files(folder))
    except ModelError:
        return False


def _download_large(repo: str, commit: str, files: list[RepoFile]) -> None:
    """Downloads large files into the hub's cache, each from where an earlier attempt ended."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    from outstride.models.download import download

    storage = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    for file in files:
        if file.size < min(_LARGE, constants.MAX_HTTP_DOWNLOAD_SIZE):
            continue
        if (storage / "snapshots" / commit / file.path).exists():
            continue
        about = get_hf_file_metadata(hf_hub_url(repo, file.path, revision=commit))
        if about.etag and about.size and about.location:
            download(about.location, storage / "blobs" / about.etag, about.size, file.path)


def _explain(name: HubName, error: Exception) -> NoReturn:
    """Raises the error of this package that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, ModelError):
        raise error
    if isinstance(error, GatedRepoError):
        raise ModelNotFound(
            f"{name.repo!r} is open only to users who accepted its terms: accept them on the page of "
            "the repository, then log in with 'hf auth login'"
        ) from error
    if isinstance(error, RevisionNotFoundError):
        raise ModelNotFound(f"{name.repo!r} has no revision {name.revision!r}") from error
    if isinstance(error, RepositoryNotFoundError):
        raise ModelNotFound(f"the hub has no model {name.repo!r} (or it is private)") from error
    if isinstance(error, TypeError | AttributeError | LookupError | NameError):  # not the network
        raise error
    files = f"'*{name.kind}*.gguf'" if name.kind else "'*.json' '*.safetensors' 'tokenizer*'"
    at = f" --revision {name.revision}" if name.revision else ""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    if isinstance(error, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
    else:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    raise DownloadFailed(
        f"{str(name)!r} is not in the cache and could not be downloaded from {constants.ENDPOINT}: "
        f"{reason}. What has arrived is kept; try again. Without a network, run 'hf download "
        f"{name.repo}{at} --include {files}' where there is one and copy the folder to {folder}, or "
        "name the path of a GGUF file or checkpoint folder"
    ) from error
