"""`outstride models`: lists the models that have an alias, and what else can be loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outstride.cli import screen
from outstride.cli.context import Context


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "models",
        help="list the models that have an alias",
        description="Lists the models that have an alias, and whether they are downloaded.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, _context: Context) -> int:
    """Prints the list."""
    from outstride.models.families import ARCHITECTURES
    from outstride.models.fetch import ALIASES, cache_dir, shipped

    models = []
    for name, source in sorted(ALIASES.items()):
        path = cache_dir() / "models" / source.filename
        cached = path.is_file() and path.stat().st_size == source.size
        models.append(
            {
                "name": name,
                "file": source.filename,
                "bytes": source.size,
                "cached": cached,
                "path": str(path) if cached else None,
                "source": f"{source.package} {source.version} (Python package index)",
            }
        )
    architectures = sorted(ARCHITECTURES)
    if args.json:
        values = {
            "models": models,
            "shipped": {name: str(path) for name, path in shipped().items()},
            "architectures": architectures,
            "cache": str(cache_dir()),
        }
        print(json.dumps(values, ensure_ascii=False))
    else:
        _print(models, list(shipped()), architectures, cache_dir())
    return 0


def _print(
    models: list[dict[str, Any]], packaged: list[str], architectures: list[str], cache: Path
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", style="bold", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("downloaded", no_wrap=True)
    table.add_column("where", overflow="fold")
    for model in models:
        here = Text("yes", style="green") if model["cached"] else Text("no", style="yellow")
        where = model["path"] or f"downloaded on first use from {model['source']}"
        table.add_row(model["name"], f"{model['bytes'] / 1e6:.0f} MB", here, where)
    for name in packaged:
        table.add_row(
            name, "2 MB", Text("yes", style="green"), "part of the package; for benchmarks"
        )
    console = screen.console()
    console.print(table)
    console.print(
        "--model also takes a GGUF file, a checkpoint folder (safetensors) or a hub id org/name "
        f"with one of these architectures: {', '.join(architectures)}.",
        style="dim",
    )
    console.print(
        f"Downloads are kept in {cache} (OUTSTRIDE_CACHE sets another folder).", style="dim"
    )
