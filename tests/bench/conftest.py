"""Fixtures of the tests of measurements: the command line, as its own tests have it."""

from __future__ import annotations

from tests.cli.conftest import shell

__all__ = ["shell"]
