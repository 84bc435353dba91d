"""Draft heads as users name them: `METHOD:from=FOLDER`, for the target or for a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.errors import ModelNotFound, UnsupportedModel
from outstride.train.accept_head import AcceptHeadRecipe, JudgeRecipe
from outstride.train.corpus_files import TrainingRows
from outstride.train.heads import HeadsRecipe
from outstride.train.prompt_tokens import PromptTokensRecipe
from outstride.train.recipe import Recipe
from outstride.train.target import Target
from tests.serve import tiny
from tests.train.small import written


def some_rows(size: int) -> TrainingRows:
    tokens = torch.randint(size, (6, 24), generator=torch.Generator().manual_seed(0))
    whole = torch.full((6,), 24)
    none = torch.zeros(6, dtype=torch.bool)
    return TrainingRows(tokens, torch.full((6,), 4), whole, none, torch.arange(6))


def test_methods_find_their_draft_heads(tmp_path: Path) -> None:
    model = str(tiny.make(tmp_path / "model"))
    target = Target.load(model)
    parts: list[Recipe] = [
        HeadsRecipe(target, heads=2),
        HeadsRecipe(target, heads=2, chained=False),
        PromptTokensRecipe(target, count=2, kept=3),
        AcceptHeadRecipe(target, inner=4),
        JudgeRecipe(target, inner=4),
    ]
    folders = []
    for i, part in enumerate(parts):
        part.prepare(some_rows(target.config.vocab_size))
        folders.append(written(part, tmp_path / str(i), int8=True))
    llm = LLM(model, weights="fp32")
    try:
        params = SamplingParams(max_tokens=12)
        [plain] = llm.generate("one two three", params, method="plain")
        for spec in (
            f"heads:from={folders[0]}",
            f"heads:from={folders[1]}",
            f"prompt-tokens:from={folders[2]}",
            f"accept-head:model={model},from={folders[3]}",
            f"judge:model={model},from={folders[4]},sure=1",
        ):
            [found] = llm.generate("one two three", params, method=spec)
            assert found.token_ids == plain.token_ids, spec
        with pytest.raises(UnsupportedModel, match="this method needs one of 'heads'"):
            llm.method(f"heads:from={folders[2]}")
        with pytest.raises(ModelNotFound, match="outstride train prompt-tokens"):
            llm.method("prompt-tokens")
    finally:
        llm.close()
