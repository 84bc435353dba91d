"""`outstride methods`: every registered method, what it promises and what it needs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from outstride import registry
from outstride.cli import screen
from outstride.cli.context import Context

_COLOURS = {"exact": "green", "distribution": "yellow", "lossy": "red"}


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "methods",
        help="list the methods",
        description="Lists the methods. An exact one returns the text of plain decoding; one that "
        "keeps the distribution returns other text, as likely; a lossy one may change the text.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, _context: Context) -> int:
    """Lists."""
    registry.discover()
    if args.json:
        print(json.dumps([_values(entry) for entry in registry.entries()], ensure_ascii=False))
    else:
        _print(registry.entries())
    return 0


def _values(entry: registry.Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "family": entry.family,
        "exactness": entry.exactness.value,
        "exact_to": entry.exact_to if entry.exactness.value == "exact" else None,
        "needs": list(entry.needs),
        "paper": entry.paper,
        "summary": entry.summary,
        "cost": entry.cost,
        "options": [
            {
                "name": option.name,
                "type": option.type.__name__,
                "default": option.default,
                "required": option.required,
            }
            for option in entry.options
        ],
    }


def _option(option: registry.Option) -> str:
    return f"{option.name}=…" if option.required else f"{option.name}={option.default}"


def _print(entries: list[registry.Entry]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("family")
    table.add_column("exactness", no_wrap=True)
    table.add_column("needs")
    table.add_column("what it does", ratio=1)
    for entry in entries:
        about = Text(entry.summary)
        if entry.options:
            about.append(f"\noptions: {', '.join(map(_option, entry.options))}", style="cyan")
        about.append(f"\n{entry.paper}\n", style="dim")
        exactness = entry.exactness.value
        whose = f"{exactness} to {entry.exact_to}" if entry.exact_to != "plain" else exactness
        table.add_row(
            entry.name,
            entry.family,
            Text(whose, style=_COLOURS[exactness]),
            ", ".join(entry.needs) or "-",
            about,
        )
    console = screen.console()
    console.print(table)
    console.print(
        "Write a method as name or name:key=value,key=value, for example "
        "--method ngram:length=12,longest=3",
        style="dim",
    )
