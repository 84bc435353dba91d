"""Tokenizers without a `tokenizer.json`: from the vocabulary lists of GGUF and other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.pre_tokenizers import pre_tokenizer

_CLASSES = {"DreamTokenizer": "qwen2", "GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""Pre-tokenizers by the tokenizer class that a checkpoint names."""

UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6
"""Token types in GGUF files."""
SPACE = "▁"


def with_merges(vocab: Mapping[str, int], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    """BPE: pairs merge in the order in which they are listed. pre: the name of a pre-tokenizer."""
    split = pre_tokenizer(pre)
    pairs: list[Any] = [_pair(merge) for merge in merges]
    rest: dict[str, Any] = {} if split.byte_level else {"byte_fallback": True, "fuse_unk": True}
    if not split.byte_level and "<unk>" in vocab:
        rest["unk_token"] = "<unk>"
    try:
        model = models.BPE(vocab=dict(vocab), merges=pairs, ignore_merges=split.whole_words, **rest)
    except Exception as error:
        raise CorruptModel(f"vocabulary and merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if not split.byte_level:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.decoder = _space_decoder(prefixed=False)
        return backend
    cuts = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in split.splits
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if split.normalized:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    """Both sides of a merge; the first one has at least one character, which may be a space."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise CorruptModel(f"the merge {merge!r} does not name two tokens")
    return merge[:cut], merge[cut + 1 :]


def _space_decoder(*, prefixed: bool) -> Any:
    """From tokens with `▁` for spaces. prefixed: whether encoding puts a space before the text."""
    return decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )


def with_scores(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], space: bool
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: pairs merge in the order of the scores of the merged tokens."""
    if len(scores) != len(tokens):
        raise CorruptModel(f"{len(tokens)} tokens but {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for i, token in enumerate(tokens):
        if kinds[i] in (UNKNOWN, CONTROL, BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
    ranked.sort()
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == UNKNOWN), None)
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
    backend.decoder = _space_decoder(prefixed=space)
    return backend


def mark_special(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
    """Marks the control tokens and the user-defined tokens of a GGUF file."""
    control = [tokens[i] for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
    user = [tokens[i] for i, kind in enumerate(kinds) if kind == USER]
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
    numbers = {text: int(token["id"]) for text, token in _listed_tokens(config, added).items()}
    backend = with_merges({**vocab, **numbers}, pairs, pre)  # ids may have gaps
    add_tokens(backend, config, added)
    return backend


def _listed_tokens(config: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, Any]:
    """Added tokens by their texts: from `tokenizer_config.json` and `added_tokens.json`."""
    found: dict[str, Any] = {text: {"id": i, "special": True} for text, i in added.items()}
    for i, token in (config.get("added_tokens_decoder") or {}).items():
        found[token["content"]] = {**token, "id": int(i)}
    return found


def add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], added: Mapping[str, int]
) -> None:
    """Adds the tokens of `tokenizer_config.json` and `added_tokens.json` in the order of their ids.

    An error if one would get another id than it has.
    """
    for text, token in sorted(
        _listed_tokens(config, added).items(), key=lambda item: int(item[1]["id"])
    ):
        options = {key: bool(token.get(key)) for key in ("lstrip", "rstrip", "single_word")}
        special = bool(token.get("special"))
        mark = AddedToken(
            text, normalized=bool(token.get("normalized")), special=special, **options
        )
        (backend.add_special_tokens if special else backend.add_tokens)([mark])
        if backend.token_to_id(text) != int(token["id"]):
            raise CorruptModel(
                f"the added token {text!r} has the id {token['id']}, which does not follow the ids of "
                "the vocabulary"
            )
