"""The default model against transformers, loaded by transformers: greedy, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.models.load import locate

pytestmark = pytest.mark.model

LENGTH = 128
NEAR = 1e-4
"""Two logits closer than this may come out either way in float32."""

PROMPTS = [
    "What is the capital of Portugal?",
    "List five things one can do with an old newspaper.",
    "Explain to a child why the moon changes its shape.",
    "Translate to French: The cat sleeps under the old table.",
    "Write a haiku about rain on a tin roof.",
    "A train travels 60 km in 45 minutes. How fast is it in km/h? Think step by step.",
    "Write a Python function that reverses the words of a sentence.",
    "Summarise: Bees visit flowers for nectar. In doing so they carry pollen from plant to plant.",
    "Who wrote Pride and Prejudice, and when?",
    "Correct the spelling: Ther are to many peple hear.",
    "Give me a recipe for pancakes with exact amounts.",
    "What is the difference between a lake and a sea?",
    "Continue the story: The door of the lighthouse had never been locked before.",
    "Extract the names: Anna met Boris and Clara in front of the station.",
    "Sort these numbers from small to large: 14, 3, 77, 21, 8.",
    "Write a polite letter that cancels a subscription.",
    "Name three inventions of the nineteenth century and say what each changed.",
    "Is water wet? Argue both sides in two sentences each.",
    "Turn this into JSON: name Tom, age 34, city Oslo.",
    "Why do cats purr?",
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    path = locate("smollm2")
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    ).eval()


def test_greedy_text_is_that_of_transformers(oracle: Any) -> None:
    """All prompts in one batch here, each alone there.

    After a near tie, which is printed, the comparison goes on along the oracle's text.
    """
    near_ties = 0
    with LLM("smollm2", weights="fp32") as llm:
        asked = {i: llm.encode(p, chat=True) for i, p in enumerate(PROMPTS)}
        left = dict.fromkeys(asked, LENGTH)
        while left:
            numbers = list(left)
            results = llm.generate(
                [asked[i] for i in numbers],
                [SamplingParams(max_tokens=left[i], ignore_eos=True) for i in numbers],
                method="ngram:length=3,shortest=3",  # few nodes in vain: each costs time in fp32
            )
            for i, result in zip(numbers, results, strict=True):
                prompt, ours = asked[i], result.token_ids
                with torch.inference_mode():
                    logits = oracle(torch.tensor([prompt + ours[:-1]])).logits[0]
                theirs = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
                wrong = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
                if not wrong:
                    del left[i]
                    continue
                at = wrong[0]
                row = logits[len(prompt) - 1 + at]
                gap = float(row[theirs[at]] - row[ours[at]])
                print(f"prompt {i}, token {LENGTH - left[i] + at}: near tie, gap {gap:.2e}")
                assert gap <= NEAR, f"prompt {i}: {ours[at]} instead of {theirs[at]}"
                near_ties += 1
                asked[i] = prompt + ours[:at] + [theirs[at]]
                left[i] -= at + 1
                if left[i] == 0:
                    del left[i]
    assert near_ties <= 3
