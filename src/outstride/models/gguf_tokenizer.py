"""The tokenizer that the metadata of a GGUF file describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.chat_template import gguf_templates
from outstride.models.pre_tokenizers import PRE_TOKENIZERS
from outstride.models.vocabulary import CONTROL, mark_special, with_merges, with_scores

_MODELS = ("gpt2", "llama", "gemma4")
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "[EOT]")
"""Control tokens that end a turn, for files that name none."""


def read_tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Tokenizer`; an error if the metadata lacks or contradicts something."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    model, tokens = get("model"), get("tokens")
    if model is None or tokens is None:
        raise CorruptModel("the file has no vocabulary (tokenizer.ggml.model and .tokens)")
    kinds = get("token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CorruptModel(f"{len(tokens)} tokens but {len(kinds)} kinds of tokens")
    pre = "gemma4" if model == "gemma4" else str(get("pre") or "default")
    if model not in _MODELS:
        raise UnsupportedModel(
            f"the tokenizer {model!r} is not supported; supported are {', '.join(_MODELS)}"
        )
    if model == "llama":
        space = bool(get("add_space_prefix", True))
        backend = with_scores(tokens, get("scores") or [], kinds, space)
        add_bos = True
    else:
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = with_merges(vocab, get("merges") or [], pre)
        add_bos = PRE_TOKENIZERS[pre].add_bos
    mark_special(backend, tokens, kinds)
    bos, eos = get("bos_token_id"), get("eos_token_id")
    named = {}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        if (token := get(f"{key}_token_id")) is not None and 0 <= token < len(tokens):
            named[name] = tokens[token]
    ends = {get(f"{key}_token_id") for key in ("eos", "eot", "eom")}
    if get("eot_token_id") is None:
        ends.add(_end_of_turn(tokens, kinds))
    return {
        "backend": backend,
        "bos_id": bos,
        "eos_ids": [end for end in ends if end is not None],
        "templates": gguf_templates(metadata),
        "named": named,
        "prepend": [bos] if get("add_bos_token", add_bos) and bos is not None else [],
        "append": [eos] if get("add_eos_token", False) and eos is not None else [],
    }


def _end_of_turn(tokens: Sequence[str], kinds: Sequence[int]) -> int | None:
    """The control token that ends a turn by its text; None where there is none.

    In gpt-oss, `<|end|>` ends a message and not the turn, which `<|return|>` does.
    """
    control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == CONTROL}
    if "<|return|>" in control:
        return control["<|return|>"]
    return next((control[text] for text in _END_OF_TURN if text in control), None)
