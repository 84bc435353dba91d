"""Fixtures of the grammar tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the converted weights of test models out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTSTRIDE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
