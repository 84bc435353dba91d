"""Checkpoints of every family on the native kernels: close to fp32, and folded weights among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outstride.core.graph import FloatArray
from outstride.models.decoder import Decoder
from outstride.models.load import load, opened, rounded_reference
from outstride.ops.cpu import Cpu, native
from tests.models.checkpoints import VARIANTS, make, save
from tests.models.drive import Hand, tokens

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)
FAMILIES = (
    "phi3 partial",
    "phi3 long",
    "granite",
    "granite tied",
    "olmo2",
    "olmo3 yarn",
    "glm4",
    "gemma2 caps",
    "gemma3",
    "ministral3",
    "gpt oss",
)


BOUND, OWN_BOUNDS = 0.03, {"olmo2": 0.05, "olmo3 yarn": 0.05, "gemma3": 0.035}
"""Relative RMS error of int8 logits. Where branches are normalised after their products, what eight
bits cost a product is not made small by the residual stream. Trained weights have wider gates than
random ones, whose products gate * up have the errors of both."""
OWN: dict[str, dict[str, Any]] = {
    "phi3 long": {"hidden_size": 96},  # it has as many RoPE factors
    "gpt oss": {"num_experts_per_tok": 9},  # all of them: a choice between equals may go either way
}


def read(model: Decoder) -> FloatArray:
    return Hand(model, list(range(8))).read(tokens(100), 30)


def relative(ours: FloatArray, theirs: FloatArray) -> float:
    return float(np.sqrt(np.mean((ours - theirs) ** 2)) / theirs.std())


def test_the_listed_variants_exist() -> None:
    assert set(FAMILIES) <= set(VARIANTS)


@pytest.mark.parametrize("variant", FAMILIES)
def test_close_to_the_reference(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))
    wide: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 256,
        "initializer_range": 0.02,
    } | OWN.get(variant, {})
    folder = save(make(variant, **wide), tmp_path / "model")
    config, open_model, _ = opened(folder)
    assert Cpu.supports(config) is None
    exact = read(load(str(folder), pages=16, weights="fp32").model)
    int8 = load(str(folder), pages=16, weights="int8").model
    assert relative(read(int8), exact) < OWN_BOUNDS.get(variant, BOUND)
    rounded = Decoder.from_tensors(
        config, open_model().read(), pages=16, make_ops=rounded_reference
    )
    int4 = load(str(folder), pages=16, weights="int4").model
    assert relative(read(int4), read(rounded)) < 0.08


def test_gates_far_below_zero_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(-gate) does not fit into a float there; the MLP must add nothing, not gate * up."""
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))
    found = []
    for bias in (-60.0, -300.0):
        made = make("llama biases", hidden_size=192, intermediate_size=256)
        for layer in made.model.layers:
            layer.mlp.gate_proj.bias.data.fill_(bias)
        folder = save(made, tmp_path / f"model{bias}")
        found.append(read(load(str(folder), pages=16, weights="int8").model))
    assert np.allclose(found[0], found[1], atol=1e-5)
