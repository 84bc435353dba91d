"""How every bench runs and ends: progress, a file that grows, a table, and one JSON object."""

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
    """`1,2,4` as numbers, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write whole numbers with commas between them, not {text!r}"
        ) from None


def decimals(text: str) -> list[float]:
    """`0,0.8` as numbers, each once."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write numbers with commas between them, not {text!r}"
        ) from None


def output(parser: argparse.ArgumentParser) -> None:
    """Options of everything that has a result."""
    parser.add_argument(
        "--json", action="store_true", help="print the JSON object and nothing else"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the result to a file, too, as it comes: a run that is cut short keeps what it "
        "measured",
    )


def deliver(result: BenchResult, args: argparse.Namespace) -> None:
    """Writes a result where it was asked for."""
    if args.out is not None:
        from outstride.bench import result as results

        results.write(result, args.out)
        screen.note(f"written to {args.out}")


def close(result: BenchResult, args: argparse.Namespace) -> int:
    """The result where it was asked for, and as the last line."""
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
    """Every bench goes like this. `run` fills `report`; `show` prints it for people."""
    from outstride.bench.harness import record

    with screen.bar(message) as progress:
        complete = record(result, report, run, path=args.out, progress=progress)
    if not complete:
        screen.note("cut short; what was measured until then follows")
    if not args.json and result.samples:
        show()
    if args.out is not None:
        screen.note(f"written to {args.out}")
    print(result.to_json(), flush=True)
    return 0 if complete else INTERRUPTED
