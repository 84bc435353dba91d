"""The sampling options, the same for every command that generates."""

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
    "temperature": {"type": float, "help": "0 takes the likeliest token, above it is sampled"},
    "top_k": {"type": int, "help": "sample from the k likeliest tokens only; 0 is off"},
    "top_p": {"type": float, "help": "sample from the likeliest tokens of this mass only"},
    "min_p": {"type": float, "help": "drop tokens less likely than this share of the likeliest"},
    "repetition_penalty": {"type": float, "help": "above 1, what was said becomes less likely"},
    "presence_penalty": {"type": float, "help": "subtracted once for tokens of the answer"},
    "frequency_penalty": {"type": float, "help": "subtracted per occurrence in the answer"},
    "seed": {"type": int, "help": "the same seed gives the same text"},
    "max_tokens": {"type": int, "help": "the longest answer"},
    "min_tokens": {"type": int, "help": "the shortest answer"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "ends the answer; may be repeated"},
    "stop_token_ids": {
        "action": "append",
        "type": int,
        "metavar": "ID",
        "help": "a token that ends the answer; may be repeated",
    },
    "logit_bias": {
        "action": "append",
        "type": _bias,
        "metavar": "ID=VALUE",
        "help": "added to the logit of a token; may be repeated",
    },
    "ignore_eos": {"action": "store_true", "help": "go on after the end-of-text token"},
    "n": {"type": int, "help": "how many answers"},
    "logprobs": {
        "type": int,
        "metavar": "K",
        "help": "log-probabilities of tokens and of the K likeliest beside each",
    },
}
_FLAGS = {"stop_token_ids": "--stop-token-id"}


def add(
    parser: argparse.ArgumentParser,
    *,
    without: Collection[str] = (),
    max_tokens: int = _DEFAULTS.max_tokens,
) -> None:
    """Adds the options; what is not given stays at the default of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name, settings in _OPTIONS.items():
        if name in without:
            continue
        default = max_tokens if name == "max_tokens" else getattr(_DEFAULTS, name)
        said = isinstance(default, int | float) and not isinstance(default, bool)
        options = {**settings, "dest": f"sampling_{name}", "default": None}
        if said:
            options["help"] = f"{settings['help']} (default {default})"
        if "action" not in settings:
            options.setdefault("metavar", "N" if settings["type"] is int else "X")
        group.add_argument(_FLAGS.get(name, "--" + name.replace("_", "-")), **options)
    parser.set_defaults(sampling_max_tokens_default=max_tokens)


def params_of(args: argparse.Namespace) -> SamplingParams:
    """The parameters that were asked for."""
    values: dict[str, Any] = {"max_tokens": args.sampling_max_tokens_default}
    for name in _OPTIONS:
        value = getattr(args, f"sampling_{name}", None)
        if value is not None:
            values[name] = dict(value) if name == "logit_bias" else value
    return SamplingParams.from_dict(values)
