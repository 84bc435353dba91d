"""`SamplingParams`: the sampling parameters of a request, the same under every method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outstride.core.pooling import POOLINGS
from outstride.errors import InvalidParams

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    temperature: 0 takes the most likely token; otherwise tokens are sampled.
    top_k, top_p, min_p: which tokens may be sampled, applied in this order (0, 1, 0 switch off).
    repetition_penalty: above 1, tokens of prompt and output become less likely.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for output tokens.
    logit_bias: added to the logits of single tokens.
    bad_words: token sequences that the answer must not contain.
    seed: the same seed gives the same text; without one, a random seed is used and returned.
    stop: strings that end the answer; stop_token_ids: tokens that do.
    include_stop_str_in_output: whether the text contains the stop string or token that ended it.
    skip_special_tokens: whether special tokens are left out of the text, except `visible_tokens`.
    max_tokens, min_tokens: bounds on the length of the answer.
    ignore_eos: go on after an end-of-text token.
    n: how many answers.
    logprobs: None for none, else how many of the most likely tokens to list with each token.
    prompt_logprobs: the same for the prompt's tokens.
    adapter: the LoRA adapter that the model runs with; empty for the model itself.
    pooling: `mean` or `last` asks for an embedding of the prompt, from its tokens' hidden states.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    visible_tokens: Sequence[int] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adapter: str = ""
    pooling: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        try:
            object.__setattr__(self, "stop", tuple(self.stop))
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
            object.__setattr__(self, "visible_tokens", tuple(self.visible_tokens))
            object.__setattr__(self, "bad_words", tuple(map(tuple, self.bad_words)))
            object.__setattr__(
                self, "logit_bias", {int(k): float(v) for k, v in self.logit_bias.items()}
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidParams(
                f"stop, stop_token_ids, bad_words or logit_bias is malformed: {error}"
            ) from error
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, math.inf),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidParams(f"{name} must be a number, not {value!r}")
            if not math.isfinite(value) or not low <= value <= high:
                raise InvalidParams(f"{name} must be between {low:g} and {high:g}, not {value!r}")
        for name, minimum in (("top_k", 0), ("max_tokens", 1), ("min_tokens", 0), ("n", 1)):
            self._check_int(name, minimum)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0)
        if self.seed is not None:
            self._check_int("seed", 0)
            if self.seed > MAX_SEED:
                raise InvalidParams(f"seed must be below 2**64, not {self.seed}")
        if not isinstance(self.adapter, str):
            raise InvalidParams(f"adapter must be the name of an adapter, not {self.adapter!r}")
        if self.pooling not in (None, *POOLINGS):
            raise InvalidParams(f"pooling must be one of {', '.join(POOLINGS)}")
        if self.top_p == 0:
            raise InvalidParams(
                "top_p must be above 0; for the most likely token use temperature=0"
            )
        if self.repetition_penalty == 0:
            raise InvalidParams("repetition_penalty must be above 0; 1 switches it off")
        if self.min_tokens > self.max_tokens:
            raise InvalidParams(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidParams("stop strings must be non-empty strings")
        if any(isinstance(t, bool) or not isinstance(t, int) for t in self.stop_token_ids):
            raise InvalidParams("stop_token_ids must be token ids")
        self._check_words()
        if any(math.isnan(v) or v == math.inf for v in self.logit_bias.values()):
            raise InvalidParams(
                "logit_bias values must be finite numbers, or -inf to forbid a token"
            )

    def _check_words(self) -> None:
        words = [t for word in self.bad_words for t in (*word, *([] if word else [None]))]
        if any(isinstance(t, bool) or not isinstance(t, int) for t in words):
            raise InvalidParams("bad_words must be non-empty sequences of token ids")

    def _check_int(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParams(f"{name} must be a whole number, not {value!r}")
        if value < minimum:
            raise InvalidParams(f"{name} must be at least {minimum}, not {value}")

    @property
    def has_processors(self) -> bool:
        """Whether logits change before sampling for reasons other than temperature and filters."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from JSON; an unknown name is an error that lists the known ones."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidParams(
                f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(sorted(known))}"
            )
        return cls(**values)
