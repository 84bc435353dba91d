"""`outstride bench start`: loading and first answers of new processes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import DEFAULT_MODEL, Context, add_weights_option
from outstride.cli.outcome import conduct, output

if TYPE_CHECKING:
    from outstride.bench.comparison_rows import PeerReport
    from outstride.bench.result import BenchResult


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = kinds.add_parser(
        "start",
        help="loading and first answers of new processes",
        description="Starts processes that load a model and answer one prompt twice. The first "
        "finds an empty cache folder: it converts the weights and has no cost curve. The later ones "
        "find both. Shows seconds of imports and of LLM(), memory of the first load, and how much "
        "longer the first answer takes than the second. The last line is one JSON object.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"alias, GGUF file or checkpoint folder (default {DEFAULT_MODEL})",
    )
    add_weights_option(parser)
    parser.add_argument("--method", default="auto", help="method of the answers (default auto)")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens of an answer (default 64)"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="number of later processes (default 3)"
    )
    output(parser)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, _context: Context) -> int:
    """Measures new processes."""
    from outstride.bench import new_process
    from outstride.bench.comparison_rows import PeerReport, cores
    from outstride.bench.peers.start import load_average
    from outstride.bench.result import BenchResult
    from outstride.errors import InvalidParams
    from outstride.models.load import locate

    if args.tokens < 1 or args.repeat < 1:
        raise InvalidParams("--tokens and --repeat must be at least 1")
    settings = {
        "model": args.model,
        "weights": args.weights,
        "method": args.method,
        "tokens": args.tokens,
        "repeat": args.repeat,
        "threads": cores(),
        "load average": load_average(),
    }
    process = new_process.NewProcess(
        locate(args.model).resolve(), args.weights, args.method, args.tokens
    )
    result, report = BenchResult("start", settings), PeerReport()
    return conduct(
        args,
        result,
        report,
        lambda progress: new_process.measure(
            process.ask, repeat=args.repeat, report=report, progress=progress
        ),
        lambda: _print(report, result),
        message="new processes",
    )


def _print(report: PeerReport, result: BenchResult) -> None:
    from rich.table import Table

    console = screen.console()
    console.print(
        f"[bold]New processes with {result.settings['model']}[/bold], on {result.machine['cpu']}, "
        f"load average {result.settings['load average'][:1]}"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("value", "", "of", "ratio", "must be", ""):
        table.add_column(name, justify="right" if name else "left")
    for row in report.rows:
        table.add_row(
            row.name,
            f"{row.ours:.2f}",
            row.unit,
            "" if row.theirs is None else f"{row.theirs:.2f} ({row.other})",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            str(row.bound or ""),
            {None: "", True: "met", False: "[red]not met[/red]"}[row.met],
        )
    console.print(table)
    console.print()
