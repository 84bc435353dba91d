"""Greedy text of every family against transformers: the same tokens, whichever method drafts.

To add a family, add a row to `VARIANTS` in checkpoints.py and its name here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outstride import LLM, SamplingParams
from tests.models.checkpoints import expected, make, save
from tests.models.drive import tokens

LENGTH = 32
NEAR = 1e-3
"""Where the two best logits are closer than this, either token may come out."""
METHODS = ("ngram", "lookahead", "suffix")
FAMILIES = (
    "phi3",
    "phi3 long",
    "granite",
    "olmo2",
    "olmo3 yarn",
    "glm",
    "glm4",
    "llama dynamic",
    "gemma2 caps",
    "gemma3",
    "gemma4",
    "gpt oss",
    "ministral",
    "ministral3",
    "mistral3 nested",
    "qwen3 vl",
)


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_text(variant: str, tmp_path: Path) -> None:
    theirs = make(variant)
    folder = save(theirs, tmp_path)
    prompts = [tokens(count, seed=count) for count in (40, 45, 61)]
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    with LLM(str(folder), weights="fp32", pages=64) as llm:
        plain = [result.token_ids for result in llm.generate(prompts, params, method="plain")]
        for method in METHODS:  # prompts are in the prefix cache by now
            found = llm.generate(prompts, params, method=method)
            assert [result.token_ids for result in found] == plain, method
    for prompt, ours in zip(prompts, plain, strict=True):
        logits = expected(theirs, prompt + ours[:-1])[len(prompt) - 1 :]
        best = logits.topk(2, dim=-1)
        for place, token in enumerate(ours):
            if best.values[place, 0] - best.values[place, 1] > NEAR:
                assert token == int(best.indices[place, 0]), place
