"""F32 GGUF files against llama.cpp with a KV cache in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.checkpoints import make
from tests.models.drive import Hand, load, tokens
from tests.models.gguf_files import BIG, write
from tests.models.llama_oracle import logits, python

pytestmark = pytest.mark.skipif(python() is None, reason="llama-cpp-python is not installed")
GAP = 0.01
"""Of the two best logits: where they are closer, rounding may decide which one is best."""
SCALAR = {"query_pre_attn_scalar": 16}
GPT_OSS = {
    **BIG,
    "sliding_window": 64,
    "head_dim": 16,
    # llama.cpp truncates the ramp of YaRN, which gpt-oss does not.
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3 moe", {}),
        ("qwen2 moe", {}),
        ("mixtral", {}),
        ("olmoe", {"num_key_value_heads": 6}),
        ("olmo2", {}),
        ("phi3", {}),
        ("granite tied", {}),
        ("gemma2", SCALAR),
        ("gemma3", {**SCALAR, "sliding_window": 64}),
        ("gpt oss", GPT_OSS),
        ("glm4", {}),
    ],
)
def test_the_best_token_of_llama_cpp(variant: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(make(variant, **changes), tmp_path / "m.gguf")
    prompt = tokens(60)
    theirs = logits(path, prompt)
    ours = Hand(load(str(path), pages=64).model, list(range(12))).read(prompt, 30)
    best = np.sort(theirs, axis=1)
    clear = best[:, -1] - best[:, -2] > GAP
    assert clear.mean() > 0.8
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1))[clear].all()
