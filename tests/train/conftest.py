"""Fixtures of the training tests."""

from __future__ import annotations

import pytest

from outstride.models.load import Loaded, load
from tests.serve import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model with random weights and a chat template."""
    return load(str(tiny.make(tmp_path_factory.mktemp("tiny") / "model")), weights="fp32")
