"""Words on disk: what goes in comes out, and whatever is wrong is said."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outstride.errors import InvalidData
from outstride.train import corpus_files as module
from outstride.train.corpus_files import Corpus, CorpusText

ABOUT = {"model": "some", "vocabulary": "abc", "vocab_size": 50, "end": 2}


def texts(count: int, seed: int = 0) -> list[CorpusText]:
    numbers = random.Random(seed)

    def one() -> CorpusText:
        size = numbers.randint(6, 30)
        tokens = [numbers.randrange(3, 50) for _ in range(size)]
        return CorpusText(tokens, numbers.randint(1, 5), numbers.random() < 0.5)

    return [one() for _ in range(count)]


def written(folder: Path, parts: list[list[CorpusText]]) -> Corpus:
    words = Corpus.create(folder, ABOUT)
    after = 0
    for part in parts:
        after += len(part)
        words.append(part, after)
    return words


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    parts = [texts(7, 1), texts(1, 2), [], texts(4, 3)]
    written(tmp_path, parts)
    words = Corpus.open(tmp_path, "abc")
    assert [list(shard.texts()) for shard in words.shards()] == parts
    assert [shard.next_number for shard in words.shards()] == [7, 8, 8, 12]
    assert words.end == 2


def test_rows(tmp_path: Path) -> None:
    given = [
        CorpusText([3, 4, 5, 6, 7], 2, False),
        CorpusText([8, 9], 1, True),
        CorpusText([10, 11, 12, 13, 14, 15], 4, False),  # its answer begins behind the row
        CorpusText([16, 17, 18], 0, False),
    ]
    words = written(tmp_path, [given[:1], given[1:]])
    rows = words.rows(4)
    assert rows.tokens.tolist() == [[3, 4, 5, 6], [8, 9, 2, 2], [16, 17, 18, 2]]
    assert rows.tokens.dtype == torch.int64
    assert rows.starts.tolist() == [2, 1, 1]
    assert rows.stops.tolist() == [4, 2, 3]
    assert rows.sampled.tolist() == [False, True, False]
    assert len(words.rows(6)) == 4
    assert torch.equal(words.rows(6).keys[:2], rows.keys[:2])


def test_held_out_texts_stay_held_out(tmp_path: Path) -> None:
    first, more = texts(300, 1), texts(300, 2)
    few = written(tmp_path / "a", [first]).rows(12)
    many = written(tmp_path / "b", [more, first]).rows(16)
    train, held = few.split(0.1)
    assert len(train) + len(held) == 300
    assert 10 <= len(held) <= 60
    later_train, later_held = many.split(0.1)
    assert set(held.keys.tolist()) <= set(later_held.keys.tolist())
    assert not set(later_train.keys.tolist()) & set(later_held.keys.tolist())
    one, other = few.take(slice(0, 2)).split(0.001)
    assert (len(one), len(other)) == (1, 1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        few.split(1.0)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="outstride write-data MODEL --out"):
        Corpus.open(tmp_path / "nowhere")


def test_another_vocabulary(tmp_path: Path) -> None:
    written(tmp_path, [texts(3)])
    with pytest.raises(InvalidData, match="another vocabulary"):
        Corpus.open(tmp_path, "xyz")


def test_a_corpus_with_other_options_is_not_continued(tmp_path: Path) -> None:
    written(tmp_path, [texts(3)]).note(texts=3)
    assert Corpus.create(tmp_path, ABOUT).about["texts"] == 3
    with pytest.raises(InvalidData, match="model was 'some' and is 'other' now"):
        Corpus.create(tmp_path, {**ABOUT, "model": "other"})


@pytest.mark.parametrize("size", [0, 5, 100, -20])
def test_a_truncated_shard(size: int, tmp_path: Path) -> None:
    words = written(tmp_path, [texts(5), texts(5)])
    path = words.paths()[1]
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InvalidData, match=r"part-0001.*cut off or damaged.*delete it"):
        words.rows(16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens", lambda value: value + 50),
        ("tokens", lambda value: value - 50),
        ("tokens", lambda value: value[:10]),
        ("starts", lambda value: value + 1),
        ("starts", lambda value: value.flip(0)),
        ("prompts", lambda value: value + 100),
        ("prompts", lambda value: value - 100),
        ("sampled", lambda value: value[1:]),
        ("prompts", lambda value: value.to(torch.int64)),
    ],
)
def test_a_shard_that_contradicts_itself(name: str, change: Any, tmp_path: Path) -> None:
    words = written(tmp_path, [texts(5)])
    [path] = words.paths()
    tensors = load_file(path)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path, {"after": "5"})
    with pytest.raises(InvalidData, match=r"contradict|outside the vocabulary"):
        words.rows(16)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", json.dumps({**ABOUT, "version": 1, "end": 50})], ids=str
)
def test_a_damaged_description(text: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(InvalidData, match="damaged"):
        Corpus.open(tmp_path)


def test_a_corpus_of_a_later_version(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(json.dumps({**ABOUT, "version": 9}))
    with pytest.raises(InvalidData, match="version 9"):
        Corpus.open(tmp_path)


def test_no_usable_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="write-data for longer"):
        written(tmp_path, [[]]).rows(16)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = written(tmp_path, [texts(5)])

    def full(tensors: dict[str, torch.Tensor], place: Path, about: dict[str, str]) -> None:
        place.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(InvalidData, match=r"No space left on device.*free some space"):
            words.append(texts(5), 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.json", "part-0000.safetensors"]
    assert len(Corpus.open(tmp_path).rows(16)) == 5


@pytest.mark.parametrize("below", ["", "new"])
def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path, below: str) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(InvalidData, match=r"taken is a file; name a folder with --out"):
        Corpus.create(file / below, {"end": 0})
    with pytest.raises(InvalidData, match=r"/proc/none/words: .+; name a folder with --out"):
        Corpus.create("/proc/none/words", {"end": 0})
