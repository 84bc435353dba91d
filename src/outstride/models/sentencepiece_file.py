"""`tokenizer.model`: the vocabulary that SentencePiece writes, a protocol buffer.

Only the fields that a tokenizer needs are read: the tokens with their scores and types, the kind of
model, and how texts are normalized.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.vocabulary import add_tokens, mark_special, with_scores

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2
_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}


@dataclass(slots=True)
class SentencePieceModel:
    """The contents of a file. Token types are those of GGUF files.

    prefixed: whether a space is put before a text. collapsed: whether several spaces become one.
    rules: of the normalization, compiled; empty for none.
    """

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    algorithm: int = 1
    bos_id: int = 1
    eos_id: int = 2
    prefixed: bool = True
    collapsed: bool = True
    rules: bytes = b""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in order: numbers, and values by their wire type."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        value: Any
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("a field reaches beyond its message")
            value, at = data[at : at + size], at + size
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
            if at + size > end:
                raise ValueError("a field reaches beyond its message")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"there is no wire type {kind}")
        yield key >> 3, value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The contents of a `tokenizer.model`; an error if it is not one."""
    found = SentencePieceModel()
    try:
        for number, message in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(message))
                found.tokens.append(piece.get(1, b"").decode())
                found.scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                found.kinds.append(int(piece.get(3, 1)))
            elif number == 2:
                trainer = dict(_fields(message))
                found.algorithm = int(trainer.get(3, 1))
                found.bos_id, found.eos_id = (
                    _signed(int(trainer.get(key, default))) for key, default in ((41, 1), (42, 2))
                )
            elif number == 3:
                rules = dict(_fields(message))
                found.rules = bytes(rules.get(2, b""))
                found.prefixed, found.collapsed = (bool(rules.get(key, 1)) for key in (3, 4))
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CorruptModel(f"{path} is cut off or no SentencePiece model: {error}") from error
    if not found.tokens:
        raise CorruptModel(f"{path} is no SentencePiece model: it has no tokens")
    return found


def from_sentencepiece(
    path: Path, config: Mapping[str, Any], added: Mapping[str, int]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A tokenizer from a `tokenizer.model`, and the texts of its special tokens by name.

    Added tokens are in `tokenizer_config.json`, or as texts with ids in `added_tokens.json`.
    """
    from tokenizers import Regex, normalizers

    model = read_sentencepiece(path)
    if model.algorithm != _BPE:
        kind = _KINDS.get(model.algorithm, str(model.algorithm))
        raise UnsupportedModel(
            f"{path} is a SentencePiece model of kind {kind}; without a tokenizer.json, supported is "
            "BPE: get the model's tokenizer.json as well"
        )
    backend = with_scores(model.tokens, model.scores, model.kinds, model.prefixed)
    steps: list[Any] = [normalizers.Precompiled(model.rules)] if model.rules else []
    if model.collapsed:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence([*steps, backend.normalizer])
    mark_special(backend, model.tokens, model.kinds)
    add_tokens(backend, config, added)
    ids = {"bos_token": model.bos_id, "eos_token": model.eos_id}
    return backend, {name: model.tokens[i] for name, i in ids.items() if 0 <= i < len(model.tokens)}
