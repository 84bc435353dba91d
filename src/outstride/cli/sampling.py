"""The sampling options, shared by all commands that generate text."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from outstride.core.params import SamplingParams

_DEFAULTS = SamplingParams()


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    try:
        if equals:
            return int(token), float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"write TOKEN_ID=VALUE, not {text!r}")


_OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {
        "type": float,
        "help": "0 is greedy decoding; above 0, tokens are sampled at this temperature",
    },
    "top_k": {"type": int, "help": "sample from the K most probable tokens only; 0 is off"},
    "top_p": {
        "type": float,
        "help": "nucleus sampling: the most probable tokens up to this total probability",
    },
    "min_p": {"type": float, "help": "drop tokens below this fraction of the highest probability"},
    "repetition_penalty": {
        "type": float,
        "help": "above 1, tokens of the prompt and the answer become less probable",
    },
    "presence_penalty": {
        "type": float,
        "help": "subtracted from the logits of tokens that are in the answer",
    },
    "frequency_penalty": {
        "type": float,
        "help": "subtracted from logits for each occurrence in the answer",
    },
    "seed": {"type": int, "help": "seed of the sampling; the same seed gives the same text"},
    "max_tokens": {"type": int, "help": "maximum number of tokens of the answer"},
    "min_tokens": {"type": int, "help": "minimum number of tokens of the answer"},
    "stop": {
        "action": "append",
        "metavar": "TEXT",
        "help": "text that ends the answer; may be repeated",
    },
    "stop_token_ids": {
        "action": "append",
        "type": int,
        "metavar": "ID",
        "help": "token that ends the answer; may be repeated",
    },
    "logit_bias": {
        "action": "append",
        "type": _bias,
        "metavar": "ID=VALUE",
        "help": "value that is added to the logit of a token; may be repeated",
    },
    "ignore_eos": {"action": "store_true", "help": "continue after the end-of-text token"},
    "n": {"type": int, "help": "number of answers"},
    "logprobs": {
        "type": int,
        "metavar": "K",
        "help": "log-probability of each token, and of the K most probable ones at its position",
    },
}
_FLAGS = {"stop_token_ids": "--stop-token-id"}


def add(
    parser: argparse.ArgumentParser,
    *,
    without: Collection[str] = (),
    max_tokens: int = _DEFAULTS.max_tokens,
) -> None:
    """Adds the options. An option that is not given has the default of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name, settings in _OPTIONS.items():
        if name in without:
            continue
        default = max_tokens if name == "max_tokens" else getattr(_DEFAULTS, name)
        has_default = isinstance(default, int | float) and not isinstance(default, bool)
        options = {**settings, "dest": f"sampling_{name}", "default": None}
        if has_default:
            options["help"] = f"{settings['help']} (default {default})"
        if "action" not in settings:
            options.setdefault("metavar", "N" if settings["type"] is int else "X")
        group.add_argument(_FLAGS.get(name, "--" + name.replace("_", "-")), **options)
    parser.set_defaults(sampling_max_tokens_default=max_tokens)


def params_of(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the options give."""
    values: dict[str, Any] = {"max_tokens": args.sampling_max_tokens_default}
    for name in _OPTIONS:
        value = getattr(args, f"sampling_{name}", None)
        if value is not None:
            values[name] = dict(value) if name == "logit_bias" else value
    for adapter in getattr(args, "adapter", ()):  # the first LoRA adapter; see `add_adapter_option`
        name, equals, _ = adapter.partition("=")
        if equals:
            values.setdefault("adapter", name)
    return SamplingParams.from_dict(values)
