"""Who is let in: a request that cannot be served is refused at once, and told why."""

from __future__ import annotations

import math
from collections.abc import Mapping

from outstride.core.contracts import Method, Model
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.engine.passes import Passes
from outstride.errors import InvalidParams, InvalidPrompt, OutOfMemory, UnknownMethod


def check(
    passes: Passes,
    tokens: list[int],
    params: SamplingParams,
    method: Method,
    fixed: Mapping[int, int] | None,
) -> int:
    """How long prompt and answer may become together; raises if the request cannot be served."""
    model = passes.models[TARGET]
    _check_method(passes, method)
    _check_kind(passes, method, params, fixed)
    if not tokens and (not fixed or model.masking is None or model.masking.shifted):
        raise InvalidPrompt("the prompt is empty")
    _check_tokens(model, [*tokens, *fixed.values()] if fixed else tokens, params)
    if len(tokens) >= model.context:
        raise InvalidPrompt(
            f"the prompt has {len(tokens)} tokens; the model's context holds {model.context}, "
            "answer included"
        )
    limit = min(model.context, len(tokens) + params.max_tokens)
    _check_room(passes, method, limit)
    return limit


def _check_method(passes: Passes, method: Method) -> None:
    """Refuses a method that names models or tokens that are not there."""
    size = passes.models[TARGET].vocab_size
    if missing := set(method.drafter.models) - set(passes.models):
        raise UnknownMethod(f"method {method.name} asks a model that is not loaded: {missing}")
    if bad := [t for t in method.drafter.tokens if not 0 <= t < size]:
        raise UnknownMethod(
            f"method {method.name} is to use token id {bad[0]}, which is outside the vocabulary "
            f"of {size}"
        )


def _check_kind(
    passes: Passes, method: Method, params: SamplingParams, fixed: Mapping[int, int] | None
) -> None:
    """Refuses a method that asks of a model what it was not made for."""
    drafter = method.drafter
    for name in (TARGET, *drafter.models):
        model, what = passes.models[name], "the model" if name == TARGET else f"model {name!r}"
        if name in drafter.fills:
            if model.masking is None:
                raise UnknownMethod(
                    f"method {method.name} fills in masks, and {what} knows none; "
                    "use an autoregressive method, such as plain, or attach a diffusion adapter"
                )
        elif model.vision.block is not None and not (model.masking and model.masking.causal):
            raise UnknownMethod(
                f"method {method.name} decodes autoregressively, which {what} cannot; "
                "use a method for masked models, such as steps"
            )
    target = passes.models[TARGET]
    if reason := drafter.fits(target.vision, target.masking):
        raise UnknownMethod(f"method {method.name} does not suit the model: {reason}")
    if TARGET in drafter.fills and params.prompt_logprobs is not None:
        raise InvalidParams(
            f"method {method.name} gives no prompt_logprobs: a masked model does not continue a prompt"
        )
    if fixed and TARGET not in drafter.fills:
        raise UnknownMethod(
            f"method {method.name} cannot fill in holes; use a method for masked models, such as steps"
        )


def _check_tokens(model: Model, known: list[int], params: SamplingParams) -> None:
    """Refuses ids that are no tokens, and a bias that leaves none."""
    size = model.vocab_size
    if bad := [t for t in known if not 0 <= t < size]:
        raise InvalidPrompt(f"token id {bad[0]} is outside the vocabulary of {size}")
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if bad := [t for t in ids if not 0 <= t < size]:
            raise InvalidParams(
                f"{name} names token id {bad[0]}, which is outside the vocabulary of {size}"
            )
    if sum(v == -math.inf for v in params.logit_bias.values()) >= size:
        raise InvalidParams("logit_bias forbids every token")


def _check_room(passes: Passes, method: Method, limit: int) -> None:
    """Refuses what would not fit into the pages, even alone."""
    drafter, most = method.drafter, passes.pools[TARGET].capacity
    if (needed := drafter.entries(limit, passes.vision(TARGET, drafter))) > most:
        raise OutOfMemory(
            f"prompt and answer may need {needed} cache entries; there are {most} in all"
            " (ask for fewer tokens, or give the engine more pages)"
        )
    for name in drafter.models if TARGET in drafter.fills else ():
        if limit > (most := passes.pools[name].capacity):
            raise OutOfMemory(
                f"prompt and answer may need {limit} cache entries of {name!r}, which has "
                f"{most} in all (ask for fewer tokens, or give the engine more pages)"
            )
