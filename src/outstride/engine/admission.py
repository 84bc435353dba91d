"""Admission: a request that cannot be served is rejected at once, with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from outstride.core.contracts import Method, Model, RecurrentModel
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.engine.final_norm import normalized
from outstride.engine.model_runner import ModelRunner
from outstride.errors import (
    InvalidParams,
    InvalidPrompt,
    OutOfMemory,
    UnknownAdapter,
    UnknownMethod,
    UnsupportedModel,
)


def check(
    runner: ModelRunner,
    tokens: list[int],
    params: SamplingParams,
    method: Method,
    fixed: Mapping[int, int] | None,
) -> int:
    """The maximum length of prompt and answer; raises a RequestError if it cannot be served."""
    model = runner.models[TARGET]
    _check_method(runner, method)
    _check_adapter(runner, method, params.adapter)
    _check_model_kind(runner, method, params, fixed)
    if not tokens and (not fixed or model.masked_spec is None or model.masked_spec.shifted):
        raise InvalidPrompt("the prompt is empty")
    _check_tokens(model, [*tokens, *fixed.values()] if fixed else tokens, params)
    if len(tokens) >= model.context:
        raise InvalidPrompt(
            f"the prompt has {len(tokens)} tokens; the model's context holds {model.context}, "
            "answer included"
        )
    limit = min(model.context, len(tokens) + params.max_tokens)
    _check_memory(runner, method, limit)
    return limit


def _check_method(runner: ModelRunner, method: Method) -> None:
    """Rejects a method that names models or tokens that do not exist."""
    size = runner.models[TARGET].vocab_size
    if missing := set(method.drafter.models) - set(runner.models):
        raise UnknownMethod(f"method {method.name} needs a model that is not loaded: {missing}")
    if bad := [t for t in method.drafter.input_tokens if not 0 <= t < size]:
        raise UnknownMethod(
            f"method {method.name} has an option that names token id {bad[0]}, which is outside "
            f"the vocabulary of {size}"
        )


def unknown_adapter(name: str, adapters: Mapping[str, str]) -> UnknownAdapter:
    """The error for an adapter that is not loaded; it names those that are."""
    known = ", ".join(sorted(adapters)) or "none: load one with adapters={name: folder}"
    return UnknownAdapter(f"there is no adapter {name!r}; loaded are {known}")


def _check_adapter(runner: ModelRunner, method: Method, adapter: str) -> None:
    """Rejects an adapter that is not loaded, or that a method does not support."""
    model = runner.models[TARGET]
    if not adapter:
        return
    if adapter not in model.adapters:
        raise unknown_adapter(adapter, model.adapters)
    masking = model.masked_spec
    if masking is not None and masking.uses_adapter and TARGET in method.drafter.masked_models:
        raise UnknownMethod(
            f"method {method.name} fills in masks with the diffusion adapter, without adapter "
            f"{adapter!r}: use an autoregressive method, such as plain"
        )


def _check_model_kind(
    runner: ModelRunner, method: Method, params: SamplingParams, fixed: Mapping[int, int] | None
) -> None:
    """Rejects a method that a model does not support."""
    drafter = method.drafter
    if drafter.layer_ranges and getattr(runner.models[TARGET], "whole_passes", False):
        raise UnknownMethod(
            f"method {method.name} does not suit the model: it runs ranges of layers, and the model "
            "runs through transformers as a whole; use another method, such as auto"
        )
    for name in (TARGET, *drafter.models):
        model, what = runner.models[name], "the model" if name == TARGET else f"model {name!r}"
        if name in drafter.masked_models:
            if model.masked_spec is None:
                raise UnknownMethod(
                    f"method {method.name} fills in masks, and {what} has no mask token; "
                    "use an autoregressive method, such as plain, or attach a diffusion adapter"
                )
        elif model.attention_pattern.block is not None and not (
            model.masked_spec and model.masked_spec.causal
        ):
            raise UnknownMethod(
                f"method {method.name} decodes autoregressively, which {what} cannot; "
                "use a method for masked models, such as steps"
            )
    target = runner.models[TARGET]
    if drafter.layer_ranges and isinstance(target, RecurrentModel) and target.state_spec:
        raise UnknownMethod(
            f"method {method.name} does not suit the model: it runs ranges of layers, and the model's "
            "recurrent state advances through all layers together; use another method, such as auto"
        )
    if reason := drafter.unsupported_reason(target.attention_pattern, target.masked_spec):
        raise UnknownMethod(f"method {method.name} does not suit the model: {reason}")
    if TARGET in drafter.masked_models and params.prompt_logprobs is not None:
        raise InvalidParams(
            f"method {method.name} gives no prompt_logprobs: a masked model does not continue a prompt"
        )
    if TARGET in drafter.masked_models and any(len(word) > 1 for word in params.bad_words):
        raise InvalidParams(
            f"method {method.name} settles several tokens at once: its bad_words must be single tokens"
        )
    if params.pooling is not None:
        if drafter.models or drafter.masked_models:
            raise InvalidParams(
                "an embedding needs the method plain, and a model that it can decode"
            )
        try:
            normalized(target, np.zeros((1, 1), dtype=np.float32))
        except UnsupportedModel as error:
            raise InvalidParams(f"this model gives no embeddings here: {error}") from error
    if fixed and TARGET not in drafter.masked_models:
        raise UnknownMethod(
            f"method {method.name} cannot do infilling; use a method for masked models, such as steps"
        )


def _check_tokens(model: Model, known: list[int], params: SamplingParams) -> None:
    """Rejects ids that are no tokens, and a bias that forbids all tokens."""
    size = model.vocab_size
    if bad := [t for t in known if not 0 <= t < size]:
        raise InvalidPrompt(f"token id {bad[0]} is outside the vocabulary of {size}")
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", [token for word in params.bad_words for token in word]),
    ):
        if bad := [t for t in ids if not 0 <= t < size]:
            raise InvalidParams(
                f"{name} names token id {bad[0]}, which is outside the vocabulary of {size}"
            )
    never = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    if len(never.union(word[0] for word in params.bad_words if len(word) == 1)) >= size:
        raise InvalidParams("logit_bias and bad_words forbid every token")


def _check_memory(runner: ModelRunner, method: Method, limit: int) -> None:
    """Rejects a request that would not fit into the KV cache even alone."""
    drafter, capacity = method.drafter, runner.pools[TARGET].capacity
    if (needed := drafter.kv_needed(limit, runner.pattern(TARGET, drafter))) > capacity:
        raise OutOfMemory(
            f"prompt and answer may need {needed} slots of the KV cache, which has {capacity}"
            " (ask for fewer tokens, or give the engine more pages)"
        )
    for name in drafter.models if TARGET in drafter.masked_models else ():
        if limit > (capacity := runner.pools[name].capacity):
            raise OutOfMemory(
                f"prompt and answer may need {limit} slots of the KV cache of {name!r}, which has "
                f"{capacity} (ask for fewer tokens, or give the engine more pages)"
            )
