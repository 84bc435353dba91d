"""`outstride methods`: every registered method, or one of them in full."""

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
        help="list the methods, or show one",
        description="Lists the decoding methods, or shows one of them in full. An exact method returns "
        "the text of plain decoding; one that keeps the distribution returns other text, as likely; a "
        "lossy one may change the text.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="NAME",
        help="show this method with its options, its cost and an example (default: list all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: a list, or one object")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, _context: Context) -> int:
    """Lists all methods, or shows one. An unknown name is an error that suggests similar ones."""
    registry.discover()
    name = args.name.partition(":")[0].strip()
    if name:
        entry = registry.entry(name)
        if args.json:
            print(json.dumps(_values(entry), ensure_ascii=False))
        else:
            _show(entry)
    elif args.json:
        print(json.dumps([_values(entry) for entry in registry.entries()], ensure_ascii=False))
    else:
        _list(registry.entries())
    return 0


def _values(entry: registry.MethodEntry) -> dict[str, Any]:
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


def _exactness(entry: registry.MethodEntry) -> str:
    exactness = entry.exactness.value
    return f"{exactness} to {entry.exact_to}" if entry.exact_to != "plain" else exactness


def _show(entry: registry.MethodEntry) -> None:
    """Prints one method in full."""
    from rich.table import Table
    from rich.text import Text

    console = screen.console()
    console.print(Text.assemble((entry.name, "bold"), f"  ({entry.family})"))
    console.print(Text(entry.summary))
    if entry.details:
        console.print(Text("\n" + entry.details))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    colour = _COLOURS[entry.exactness.value]
    facts.add_row("exactness", Text(_exactness(entry), style=colour))
    facts.add_row("needs", Text(", ".join(entry.needs) or "nothing"))
    facts.add_row("cost per step", Text(entry.cost))
    facts.add_row("paper", Text(entry.paper))
    for i, option in enumerate(entry.options):
        value = "required" if option.required else f"default {option.default!r}"
        text = Text.assemble((option.name, "cyan"), f" ({option.type.__name__}, {value})")
        facts.add_row("" if i else "options", text)
    if not entry.options:
        facts.add_row("options", Text("none"))
    facts.add_row("example", Text(f"--method {entry.example}", style="bold"))
    console.print()
    console.print(facts)


def _list(entries: list[registry.MethodEntry]) -> None:
    """Prints a table of all methods."""
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
        table.add_row(
            entry.name,
            entry.family,
            Text(_exactness(entry), style=_COLOURS[entry.exactness.value]),
            ", ".join(entry.needs) or "-",
            about,
        )
    console = screen.console()
    console.print(table)
    console.print(
        "Write a method as name or name:key=value,key=value, for example "
        "--method ngram:length=12,longest=3. `outstride methods NAME` shows one in full.",
        style="dim",
    )
