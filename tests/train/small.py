"""A small model with habits, texts that it wrote, and a training that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outstride.core.contracts import Method
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence
from outstride.engine.engine import Engine
from outstride.models.decoder import Decoder
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from outstride.train.checkpoint import write_model
from outstride.train.corpus_files import TrainingRows
from outstride.train.recipe import Recipe
from outstride.train.target import Target

OPS = {"reference": Reference} | ({"cpu": Cpu.of} if native.library_path() is not None else {})

SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "seed": 3})


def trained(recipe: Recipe, rows: TrainingRows, steps: int, rate: float = 4e-3) -> list[float]:
    """The loss of each step."""
    numbers, losses = torch.Generator().manual_seed(3), []
    for value in recipe.weights.values():
        value.requires_grad_()
    optimizer = torch.optim.AdamW(recipe.weights.values(), lr=rate)
    for _ in range(steps):
        loss = recipe.loss(rows.take(torch.randint(len(rows), (24,), generator=numbers)), numbers)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    for value in recipe.weights.values():
        value.requires_grad_(False)
    return losses


def written(recipe: Recipe, folder: Path, *, int8: bool = False) -> Path:
    """The folder of what was trained, as `fit` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"outstride": recipe.name, "version": 1, "target": dict(recipe.target.about())}
    write_model(
        folder, {**about, **recipe.config()}, {**recipe.weights, **recipe.state()}, int8=int8
    )
    return folder


def decoder(target: Target, ops: str = "reference", pages: int = 48) -> Decoder:
    """The engine's own model of a target."""
    weights = {name: value.clone() for name, value in target.weights.items()}
    return Decoder.from_tensors(
        target.config, weights, pages=pages, page_size=16, make_ops=OPS[ops]
    )


def said(
    model: Any,
    method: Method,
    prompts: list[list[int]],
    seen: list[Sequence] | None = None,
    **params: Any,
) -> tuple[list[list[int]], float]:
    """What an engine answers to all prompts at once, and the tokens per pass."""
    models = model if isinstance(model, dict) else {"target": model}
    engine = Engine(models)
    asked = SamplingParams(max_tokens=24, **params)
    found = [engine.submit(list(prompt), asked, method) for prompt in prompts]
    while engine.busy:
        engine.step()
        engine.check_integrity()
    if seen is not None:
        seen += found
    passes, emitted = (sum(getattr(s.counts, n) for s in found) for n in ("passes", "emitted"))
    return [sequence.output for sequence in found], emitted / passes
