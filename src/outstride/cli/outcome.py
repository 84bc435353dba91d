"""What all benchmarks share: progress bar, result file, table, and one JSON object at the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from outstride.cli import screen

if TYPE_CHECKING:
    from outstride.bench.harness import Progress, Report
    from outstride.bench.result import BenchResult

INTERRUPTED = 130


def numbers(text: str) -> list[int]:
    """`1,2,4` as integers, without duplicates."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write whole numbers with commas between them, not {text!r}"
        ) from None


def decimals(text: str) -> list[float]:
    """`0,0.8` as floats, without duplicates."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write numbers with commas between them, not {text!r}"
        ) from None


def output(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that have a result."""
    parser.add_argument(
        "--json", action="store_true", help="print the JSON object and nothing else"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="also write the result to a file, while it is measured: an interrupted run keeps "
        "what it has",
    )


def deliver(result: BenchResult, args: argparse.Namespace) -> None:
    """Writes a result to the file of `--out`."""
    if args.out is not None:
        from outstride.bench import result as results

        results.write(result, args.out)
        screen.note(f"written to {args.out}")


def close(result: BenchResult, args: argparse.Namespace) -> int:
    """Writes the result to the file of `--out`, and prints it as the last line."""
    deliver(result, args)
    print(result.to_json(), flush=True)
    return 0


def conduct(
    args: argparse.Namespace,
    result: BenchResult,
    report: Report,
    run: Callable[[Progress], object],
    show: Callable[[], None],
    *,
    message: str,
) -> int:
    """Runs a benchmark: `run` fills `report`, `show` prints it as a table. Returns the exit code."""
    from outstride.bench.harness import record

    with screen.bar(message) as progress:
        complete = record(result, report, run, path=args.out, progress=progress)
    if not complete:
        screen.note("interrupted; the results so far follow")
    if not args.json and result.samples:
        show()
    if args.out is not None:
        screen.note(f"written to {args.out}")
    print(result.to_json(), flush=True)
    return 0 if complete else INTERRUPTED
