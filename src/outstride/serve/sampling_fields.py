"""Sampling parameters and decoding methods from the fields of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outstride import registry
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.errors import RequestError
from outstride.models.tokenizer import Tokenizer
from outstride.serve.protocol import DecodingOptions, SamplingBody
from outstride.serve.settings import ServeSettings, invalid

MAX_OPTION = 256
"""A client may set a method's option to this number, or to four times its default if that is more."""


def sampling_params(
    body: SamplingBody,
    tokenizer: Tokenizer,
    vocab_size: int,
    bound: int,
    logprobs: int | None,
    *,
    about_prompt: int | None,
    visible: Sequence[str],
    adapter: str = "",
) -> SamplingParams:
    """The sampling parameters of a body.

    bound: the longest answer. visible: texts that stay in the answer even if they are special tokens.
    adapter: the LoRA adapter that it names; empty for none.
    """

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    try:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise invalid("logit_bias maps token ids to numbers", "logit_bias") from error
    for name, ids in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or ())):
        if any(not 0 <= token < vocab_size for token in ids):
            raise invalid(f"{name} names a token outside the vocabulary of {vocab_size}", name)
    shown = [token for text in visible if (token := tokenizer.token_id(text)) is not None]
    try:
        return SamplingParams(
            temperature=float(given(body.temperature, 1.0)),
            top_k=max(given(body.top_k, 0), 0),
            top_p=float(given(body.top_p, 1.0)),
            min_p=float(given(body.min_p, 0.0)),
            repetition_penalty=float(given(body.repetition_penalty, 1.0)),
            presence_penalty=float(given(body.presence_penalty, 0.0)),
            frequency_penalty=float(given(body.frequency_penalty, 0.0)),
            logit_bias=bias,
            bad_words=bad_words(body.bad_words or (), tokenizer),
            seed=body.seed,
            stop=body.stop or (),
            stop_token_ids=body.stop_token_ids or (),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=bool(given(body.skip_special_tokens, True)),
            visible_tokens=tuple(token for token in shown if tokenizer.is_special(token)),
            max_tokens=bound,
            min_tokens=min(given(body.min_tokens, 0), bound),
            ignore_eos=bool(body.ignore_eos),
            n=body.n or 1,
            logprobs=logprobs,
            prompt_logprobs=about_prompt,
            adapter=adapter,
        )
    except RequestError as error:
        raise invalid(str(error)) from error


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences of words, as written at the beginning of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise invalid("bad_words must not be empty", "bad_words")
        for text in (word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special=False)
            if ids:
                found[tuple(ids)] = None
    return list(found)


def method_spec(own: DecodingOptions, settings: ServeSettings) -> str:
    """The method in its usual notation: `name:key=value,…`."""
    spec = own.method or settings.method
    for key, value in (own.model_extra or {}).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not isinstance(value, bool | int | float | str) or set(text) & set(",=:"):
            raise invalid(f"outstride.{key} must be a number, a string or a boolean", "outstride")
        spec += f"{',' if ':' in spec else ':'}{key}={text}"
    try:
        entry, options = registry.parse(spec)
        _check_sizes(entry, options)
        if "model" not in {option.name for option in entry.options}:
            registry.build(spec)
    except RequestError as error:
        raise invalid(str(error), "outstride") from error
    if spec != settings.method and options.get("from", "none") not in ("", "none"):
        raise invalid(
            "a request cannot choose a draft head with `from`; the server's --method can",
            "outstride",
        )
    model = options.get("model")
    if model is not None and model not in settings.engine.draft_models:
        raise invalid(
            f"this server has no draft model {model!r}; it is started with --draft-model",
            "outstride",
        )
    if own.method is None and entry.exactness is not Exactness.EXACT:
        raise invalid(f"method {entry.name} may change the text: name it to use it", "outstride")
    return spec


def _check_sizes(entry: registry.MethodEntry, options: Mapping[str, Any]) -> None:
    """Bounds the numbers that a client may set a method's options to."""
    for option in entry.options:
        if option.type is int and option.name in options:
            limit = max(4 * (option.default or 0), MAX_OPTION)
            if options[option.name] > limit:
                raise invalid(f"outstride.{option.name} may be {limit} at most", "outstride")
