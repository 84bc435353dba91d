"""A checkpoint folder with a small model of habits: its next token depends on the last one most."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outstride.train.corpus_files import TrainingRows
from outstride.train.target import Target
from tests.serve import tiny


def make(folder: Path, used: int = 40, seed: int = 0) -> Path:
    """Only the first few tokens of its vocabulary are ever said."""
    tiny.make(folder)
    numbers, weights = torch.Generator().manual_seed(seed), {}
    for name, old in load_file(folder / "model.safetensors").items():
        values = torch.randn(old.shape, generator=numbers)
        late = name.endswith(("o_proj.weight", "down_proj.weight"))
        spread = 1.0 if "embed" in name else (0.1 if late else 1.5) * old.shape[-1] ** -0.5
        weights[name] = 1 + 0.1 * values if name.endswith("norm.weight") else spread * values
        if "lm_head" in name:
            weights[name][used:] = 0.0
    save_file(weights, folder / "model.safetensors")
    return folder


def texts(target: Target, count: int, length: int = 40, prompt: int = 4) -> TrainingRows:
    """What the model says behind random prompts, greedily."""
    last = target.config.layers
    tokens = torch.randint(40, (count, prompt), generator=torch.Generator().manual_seed(1))
    while tokens.shape[1] < length:
        state = target.hidden_states(tokens, (last,))[last][:, -1:]
        tokens = torch.cat([tokens, target.logits(state).argmax(-1)], dim=1)
    whole = torch.full((count,), length)
    none = torch.zeros(count, dtype=torch.bool)
    keys = (torch.arange(count) * 7919) % 10_007
    return TrainingRows(tokens, torch.full_like(whole, prompt), whole, none, keys)
