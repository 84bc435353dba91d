"""Tokenizers without a `tokenizer.json`: from the vocabulary lists of GGUF and other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from outstride.errors import CorruptModel, UnsupportedModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPLITS = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama-bpe": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",),
}
"""Pre-tokenizer patterns, by the name that GGUF files use."""

_CLASSES = {"DreamTokenizer": "qwen2", "GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""Pre-tokenizers by the tokenizer class that a checkpoint names."""

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
"""Token types in GGUF files."""
SPACE = "▁"


def byte_level(vocab: Mapping[str, int], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    """Byte-level BPE: pairs merge in the order in which they are listed."""
    if pre not in _SPLITS:
        raise UnsupportedModel(
            f"the pre-tokenizer {pre!r} is not supported; "
            f"supported are {', '.join(sorted(_SPLITS))}"
        )
    pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = models.BPE(
            vocab=dict(vocab),
            merges=pairs,
            ignore_merges=pre == "llama-bpe",
        )
    except Exception as error:
        raise CorruptModel(f"vocabulary and merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    cuts = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in _SPLITS[pre]
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def with_scores(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], space: bool
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: pairs merge in the order of the scores of the merged tokens."""
    if len(scores) != len(tokens):
        raise CorruptModel(f"{len(tokens)} tokens but {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for i, token in enumerate(tokens):
        if kinds[i] in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
    ranked.sort()
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(tokens[left], tokens[right]) for _, _, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Prepend(SPACE)] if space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1 if space else 0, 0),
        ]
    )
    return backend


def mark_special(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
    """Marks the control tokens and the user-defined tokens of a GGUF file."""
    control = [tokens[i] for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)]
    user = [tokens[i] for i, kind in enumerate(kinds) if kind == _USER]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in user])


def from_merges(
    vocab: Mapping[str, int],
    merges: str,
    config: Mapping[str, Any],
    added: Mapping[str, int],
) -> tokenizers.Tokenizer:
    """From `vocab.json` and `merges.txt`, as checkpoints with a tokenizer class of their own have.

    Added tokens are in `tokenizer_config.json`, or as texts with ids in `added_tokens.json`.
    """
    kind = str(config.get("tokenizer_class"))
    if (pre := _CLASSES.get(kind.removesuffix("Fast"))) is None:
        raise UnsupportedModel(
            f"there is no tokenizer.json, and {kind!r} is not a tokenizer that can be built from "
            f"vocab.json and merges.txt; those that can be are {', '.join(_CLASSES)}"
        )
    pairs = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    extra = {text: {"id": i, "special": True} for text, i in added.items()}
    for i, token in (config.get("added_tokens_decoder") or {}).items():
        extra[token["content"]] = {**token, "id": int(i)}
    numbers = {text: int(token["id"]) for text, token in extra.items()}
    backend = byte_level({**vocab, **numbers}, pairs, pre)  # ids may have gaps
    for text, token in sorted(extra.items(), key=lambda item: int(item[1]["id"])):
        options = {key: bool(token.get(key)) for key in ("lstrip", "rstrip", "single_word")}
        special = bool(token.get("special"))
        mark = AddedToken(
            text, normalized=bool(token.get("normalized")), special=special, **options
        )
        (backend.add_special_tokens if special else backend.add_tokens)([mark])
    return backend
