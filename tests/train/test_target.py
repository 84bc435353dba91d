"""The frozen model in torch: the same states and logits as transformers and the engine's decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outstride.core.graph import chain
from outstride.core.proposal import Wants
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.train.target import Target
from tests.models.checkpoints import VARIANTS, make, save
from tests.models.drive import Hand, load, tokens

TRAINABLE = ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "SmolLM3")
DENSE = [name for name, (family, _) in VARIANTS.items() if family in TRAINABLE]


def states_of(theirs: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What enters each layer of a model of transformers, what leaves the last, and the logits."""
    found: list[torch.Tensor] = []
    layers = theirs.model.layers
    hooks = [one.register_forward_pre_hook(lambda _, args: found.append(args[0])) for one in layers]
    hooks.append(
        layers[-1].register_forward_hook(
            lambda _, args, out: found.append(out[0] if isinstance(out, tuple) else out)
        )
    )
    with torch.inference_mode():
        logits = theirs(ids).logits
    for hook in hooks:
        hook.remove()
    return found, logits


@pytest.mark.parametrize("variant", DENSE)
def test_states_and_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = make(variant)
    target = Target.load(str(save(theirs, tmp_path)))
    ids = torch.tensor([tokens(40), tokens(40, seed=1)])
    wanted, logits = states_of(theirs, ids)
    assert logits.std() > 0.5
    found = target.hidden_states(ids, range(4))
    assert len(wanted) == len(found) == 4
    for tap in range(4):
        torch.testing.assert_close(found[tap], wanted[tap], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(found[3]), logits, rtol=1e-4, atol=1e-4)
    assert not any(value.requires_grad for value in (*target.weights.values(), found[3]))


def test_states_of_the_engine(tmp_path: Path) -> None:
    folder = str(save(make("llama head_dim"), tmp_path))
    target, loaded = Target.load(folder), load(folder, pages=8)
    ids = tokens(50)
    wants = Wants(nodes=tuple(range(50)), logits=True, hidden=(0, 1, 3))
    scores = Hand(loaded.model, [0, 1, 2, 3]).run(chain(ids, 0), wants)
    found = target.hidden_states(torch.tensor([ids]), (3, 0, 1))
    for tap in (0, 1, 3):
        wanted = torch.from_numpy(scores.hidden[tap])
        torch.testing.assert_close(found[tap][0], wanted, rtol=1e-4, atol=1e-4)
    assert scores.logits is not None
    torch.testing.assert_close(
        target.logits(found[3])[0], torch.from_numpy(scores.logits), rtol=1e-4, atol=1e-4
    )
    assert target.digest == loaded.tokenizer.digest
    assert target.name == folder


@pytest.mark.parametrize("variant", ["llama", "mistral window"])
def test_who_sees_whom_can_be_stated(variant: str, tmp_path: Path) -> None:
    """A row in which nothing sees its first half is a text of its own, but for its positions."""
    target = Target.load(str(save(make(variant), tmp_path)))
    ids = torch.tensor([tokens(40)])
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    usual = target.hidden_states(ids, (3,))[3]
    torch.testing.assert_close(target.hidden_states(ids, (3,), causal[None])[3], usual)
    apart = causal.clone()
    apart[20:, :20] = False
    halves = target.hidden_states(ids, (3,), apart[None])[3]
    torch.testing.assert_close(halves[:, :20], usual[:, :20])
    alone = target.hidden_states(ids[:, 20:], (3,))[3]  # attention looks at distances alone
    torch.testing.assert_close(halves[:, 20:], alone, rtol=1e-4, atol=1e-4)


def test_what_cannot_be(tmp_path: Path) -> None:
    folder = str(save(make("olmoe"), tmp_path / "experts"))
    with pytest.raises(UnsupportedModel, match="cannot be trained for olmoe models yet"):
        Target.load(folder)
    target = Target.load(str(save(make("llama"), tmp_path / "llama")))
    with pytest.raises(ValueError, match="layers 0 to 3"):
        target.hidden_states(torch.zeros(1, 4, dtype=torch.long), (1, 4))
    weights = dict(target.weights)
    del weights["model.norm.weight"]
    with pytest.raises(CorruptModel, match=r"model\.norm\.weight"):
        Target(target.config, weights, "cpu")
