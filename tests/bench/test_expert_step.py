"""One token of a mixture of experts against reading its weights: what counts, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import patch

import pytest

from outstride.bench import expert_step
from outstride.models.experts import Experts
from outstride.ops.cpu import native
from outstride.ops.routing import Routing

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)
SMALL = replace(
    expert_step.shape_of(1, vocabulary=128),
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=Experts((True,), 4, 32, Routing(2)),
)


def test_the_active_weights_of_a_token() -> None:
    dense = 128 * 64 + (4 + 2 * 2) * 16 * 64 + 64 * 64
    router, experts = 4 * 64 * 4, 2 * (2 * 32 * 64 + 64 * 32)
    found = expert_step.measure(SMALL, 8, repeat=2, threads=2)
    assert found.active_bytes == dense + router + experts
    assert (found.threads, found.layers) == (2, 1)
    assert found.ratio == found.token_best / found.read_best > 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(expert_step, "shape_of", lambda layers: SMALL):
        expert_step.main(["--repeat", "2", "--json"])
        assert json.loads(capsys.readouterr().out)["bits"] == 4
        expert_step.main(["--repeat", "2", "--bits", "8"])
    assert "ratio" in capsys.readouterr().out
