"""Options that have a new name: the old name is an error that says the new one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class RenamedOption(argparse.Action):
    """Ends the command with an error that names the new option, which is `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is now called {self.const}")


def add_renamed(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Makes `old` an error that names `new`. The help does not list it."""
    parser.add_argument(
        old,
        nargs="?",
        const=new,
        default=argparse.SUPPRESS,
        action=RenamedOption,
        help=argparse.SUPPRESS,
    )
