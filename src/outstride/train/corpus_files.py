"""The corpus that a model wrote, on disk in shards, and the rows for training.

A corpus folder holds `corpus.json`, which names the model and how the texts were written, and shards
of whole texts:

    tokens   int32, all texts one after the other
    starts   int64, where each text begins
    prompts  int32, length of the prompt at the beginning of each text
    sampled  uint8, 1 where the answer was sampled and 0 where it is greedy

A shard is written under a temporary name and renamed, so a kill leaves only whole shards. Its
metadata has the number of the next text, so that writing can resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outstride.errors import InvalidData

ABOUT = "corpus.json"
VERSION = 1
_KINDS = {"tokens": "int32", "starts": "int64", "prompts": "int32", "sampled": "uint8"}


@dataclass(frozen=True, slots=True)
class CorpusText:
    """One text: a prompt in the model's chat format, and the answer with its end-of-text token."""

    tokens: Sequence[int]
    prompt: int
    """Number of prompt tokens."""
    sampled: bool


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Texts as rows of one length, cut or padded."""

    tokens: torch.Tensor
    """int64 [n, length], padded with end-of-text tokens."""
    starts: torch.Tensor
    """int64 [n]: where the answer begins."""
    stops: torch.Tensor
    """int64 [n]: where the text ends."""
    sampled: torch.Tensor
    """bool [n]: whether the answer was sampled; the others are greedy."""
    keys: torch.Tensor
    """int64 [n]: a hash of each text, which decides whether it is held out."""

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: str | torch.device) -> TrainingRows:
        return self._each(lambda value: value.to(device))

    def take(self, rows: torch.Tensor | slice) -> TrainingRows:
        """Some of the rows, by number or by a mask."""
        return self._each(lambda value: value[rows])

    def cut(self, length: int) -> TrainingRows:
        """Rows cut to `length`; no text may be longer."""
        return replace(self, tokens=self.tokens[:, :length])

    @classmethod
    def joined(cls, several: Sequence[TrainingRows]) -> TrainingRows:
        """Rows of several corpora, of one length."""
        tables = ([getattr(rows, f.name) for rows in several] for f in fields(cls))
        return cls(*map(torch.cat, tables))

    def split(self, held: float = 0.02) -> tuple[TrainingRows, TrainingRows]:
        """Rows to train on, and a held-out share. The split depends only on each text's hash."""
        if not 0.0 < held < 1.0:
            raise ValueError(f"the share that is held out lies between 0 and 1, not at {held}")
        out = self.keys % 10_000 < round(held * 10_000)
        if len(self) >= 2 and (out.all() or not out.any()):
            out = torch.zeros_like(out)  # too few for shares: one of them
            out[self.keys.argmin()] = True
        return self.take(~out), self.take(out)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainingRows:
        return TrainingRows(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Shard:
    """Some whole texts."""

    tokens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.uint8]
    next_number: int
    """Number of the text after this shard; dropped texts have numbers too."""

    def __len__(self) -> int:
        return len(self.starts)

    def texts(self) -> Iterator[CorpusText]:
        stops = np.append(self.starts, len(self.tokens))[1:].tolist()
        for i, (start, stop) in enumerate(zip(self.starts.tolist(), stops, strict=True)):
            tokens = self.tokens[start:stop].tolist()
            yield CorpusText(tokens, int(self.prompts[i]), bool(self.sampled[i]))


class Corpus:
    """A corpus folder; `about` holds the contents of its corpus.json."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder = folder
        self.about = dict(about)

    @classmethod
    def open(cls, folder: str | Path, vocabulary: str | None = None) -> Corpus:
        """Opens a corpus folder; with `vocabulary`, its tokenizer digest must be that one."""
        folder = Path(folder)
        path = folder / ABOUT
        if not path.is_file():
            raise InvalidData(
                f"{folder} is no corpus folder ({ABOUT} is missing); "
                f"`outstride write-data MODEL --out {folder}` writes some"
            )
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            size, end = int(about["vocab_size"]), int(about["end"])
            digest, version = str(about["vocabulary"]), int(about["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidData(f"{path} is damaged ({error}); write the corpus again") from error
        if version != VERSION:
            raise InvalidData(f"{path} has version {version}; this program reads {VERSION}")
        if size < 1 or not 0 <= end < size:
            raise InvalidData(
                f"{path} is damaged (end {end} of {size} tokens); write the corpus again"
            )
        corpus = cls(folder, about)
        if vocabulary is not None and vocabulary != digest:
            raise InvalidData(
                f"the corpus in {folder} is of {about.get('model', 'another model')}, which has "
                "another vocabulary; write a corpus with the model that you train for"
            )
        return corpus

    @classmethod
    def create(cls, folder: str | Path, about: Mapping[str, Any]) -> Corpus:
        """A new corpus folder, or an existing one that was started with the same options."""
        folder = Path(folder)
        about = {"version": VERSION, **about}
        if (folder / ABOUT).is_file():
            corpus = cls.open(folder)
            if other := sorted(k for k in about if corpus.about.get(k) != about[k]):
                was, now = corpus.about.get(other[0]), about[other[0]]
                raise InvalidData(
                    f"{folder} holds a corpus with other options: {other[0]} was {was!r} and "
                    f"is {now!r} now; give the same options to go on, or another folder"
                )
            return corpus
        corpus = cls(folder, about)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            corpus.note()
        except OSError as error:
            file = next((p for p in (folder, *folder.parents) if p.is_file()), None)
            why = f"{file} is a file" if file else (error.strerror or str(error)).lower()
            raise InvalidData(
                f"cannot create a corpus in {folder}: {why}; name a folder with --out that can be "
                "made and written, such as one in your home directory"
            ) from error
        return corpus

    @property
    def end(self) -> int:
        """The end-of-text token."""
        return int(self.about["end"])

    def digest(self) -> str:
        """A digest of the texts in the folder."""
        found = hashlib.sha256()
        for shard in self.shards():
            found.update(shard.tokens.tobytes())
            found.update(shard.starts.tobytes())
        return found.hexdigest()[:16]

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.safetensors"))

    def shards(self) -> Iterator[Shard]:
        """All shards in order, each checked."""
        for path in self.paths():
            yield self._read(path)

    def append(self, texts: Sequence[CorpusText], after: int) -> None:
        """Writes one more shard; the text after it will have the number `after`."""
        lengths = [len(text.tokens) for text in texts]
        starts = np.concatenate([[0], np.cumsum(lengths[:-1])]) if texts else np.zeros(0)
        flat = np.fromiter((t for text in texts for t in text.tokens), np.int32, sum(lengths))
        number = len(self.paths())
        tensors = {
            "tokens": torch.from_numpy(flat),
            "starts": torch.from_numpy(starts.astype(np.int64)),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
            "sampled": torch.tensor([text.sampled for text in texts], dtype=torch.uint8),
        }
        place = self.folder / f"part-{number:04d}.safetensors"
        with replacing(place) as fresh:
            save_file(tensors, fresh, {"after": str(after)})

    def note(self, **counts: Any) -> None:
        """Writes corpus.json with the current counts."""
        self.about.update(counts)
        with replacing(self.folder / ABOUT) as fresh:
            fresh.write_text(json.dumps(self.about, indent=1) + "\n", encoding="utf-8")

    def _read(self, path: Path) -> Shard:
        try:
            with safe_open(path, "numpy") as file:
                found = {name: file.get_tensor(name) for name in _KINDS}
                shard = Shard(**found, next_number=int((file.metadata() or {})["after"]))
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InvalidData(
                f"{path} is cut off or damaged ({error}); delete it and all later shards, and "
                "run write-data again with the same options"
            ) from error
        self._check(path, shard)
        return shard

    def _check(self, path: Path, shard: Shard) -> None:
        sizes = np.diff(np.append(shard.starts, len(shard.tokens)))
        sound = (
            all(str(getattr(shard, name).dtype) == kind for name, kind in _KINDS.items())
            and len(shard.starts) == len(shard.prompts) == len(shard.sampled)
            and (len(shard) == 0 or shard.starts[0] == 0)
            and bool(((shard.prompts >= 0) & (sizes > shard.prompts)).all())
        )
        if not sound:
            raise InvalidData(f"{path}: its tensors contradict each other; delete it")
        size = int(self.about["vocab_size"])
        if len(shard.tokens) and not 0 <= shard.tokens.min() <= shard.tokens.max() < size:
            raise InvalidData(
                f"{path} holds token ids outside the vocabulary of {size} tokens; delete it"
            )

    def rows(self, length: int) -> TrainingRows:
        """One row for each text: its first `length` tokens, if they include some of the answer."""
        if length < 2:
            raise ValueError(f"rows have at least 2 tokens, not {length}")
        tables = [_rows(shard, length, self.end) for shard in self.shards()]
        if not tables or not sum(map(len, tables)):
            raise InvalidData(
                f"{self.folder} holds no text with an answer within {length} tokens; "
                "run write-data for longer"
            )
        return TrainingRows.joined(tables)


def _rows(shard: Shard, length: int, end: int) -> TrainingRows:
    sizes = np.diff(np.append(shard.starts, len(shard.tokens)))
    stops = np.minimum(sizes, length)
    firsts = np.maximum(shard.prompts, 1)
    tokens = _table(shard, sizes, length, end)
    return TrainingRows(
        torch.from_numpy(tokens),
        torch.from_numpy(firsts.astype(np.int64)),
        torch.from_numpy(stops.astype(np.int64)),
        torch.from_numpy(shard.sampled.astype(bool)),
        torch.from_numpy(_keys(_table(shard, sizes, _KEYED, end))),
    ).take(torch.from_numpy(firsts < stops))


def _table(
    shard: Shard, sizes: npt.NDArray[np.int64], length: int, end: int
) -> npt.NDArray[np.int64]:
    """The first tokens of each text, padded with end-of-text tokens: [texts, length]."""
    if not len(shard):
        return np.zeros((0, length), np.int64)
    places = np.arange(length)
    flat = np.minimum(shard.starts[:, None] + places, len(shard.tokens) - 1)
    return np.where(places < sizes[:, None], shard.tokens[flat], end).astype(np.int64)


_KEYED = 128
"""Tokens of a text that its hash covers."""


def _keys(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A hash of each row. It depends on nothing else, so held-out texts stay held out."""
    state = np.full(len(tokens), 0xCBF29CE484222325, np.uint64)
    for column in tokens.astype(np.uint64).T:
        state = (state ^ (column + np.uint64(1))) * np.uint64(0x100000001B3)
        state ^= state >> np.uint64(29)
    return (state >> np.uint64(1)).astype(np.int64)


def _mode() -> int:
    """Permissions of a new file by the user's umask; some writers create private files."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


_MODE = _mode()


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Yields a temporary name; if the block succeeds, the file is renamed to `place`, else removed.

    The previous file stays whole until then. A full disk raises an error that says so.
    """
    fresh = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        yield fresh
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.chmod(_MODE)
        fresh.replace(place)
    except (OSError, SafetensorError) as error:
        fresh.unlink(missing_ok=True)
        raise InvalidData(
            f"cannot write {place}: {error}; free some space or choose another folder, then run "
            "the same "
            "command again: what was written before is whole"
        ) from error
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
