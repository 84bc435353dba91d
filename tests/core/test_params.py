"""Sampling parameters reject invalid values and name valid ones."""

from __future__ import annotations

from typing import Any

import pytest

from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repetition_penalty": 0},
        {"presence_penalty": float("inf")},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"n": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.0},
        {"stop": ("",)},
        {"stop": 5},
        {"stop_token_ids": ("a",)},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": [1]},
        {"logprobs": -1},
        {"prompt_logprobs": 1.5},
    ],
)
def test_impossible_values_are_named(values: dict[str, Any]) -> None:
    name = next(iter(values))
    with pytest.raises(InvalidParams, match=name):
        SamplingParams(**values)


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(InvalidParams, match="temprature"):
        SamplingParams.from_dict({"temprature": 1})


def test_convenient_forms() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2], logit_bias={"5": 1})  # type: ignore[dict-item]
    assert params.stop == ("x",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {5: 1.0}
    assert SamplingParams.from_dict({"top_k": 3}).top_k == 3
