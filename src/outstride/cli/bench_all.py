"""`outstride bench all` and `outstride bench report`: all benchmarks, and one page about them."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli.context import Context, add_model_options
from outstride.cli.outcome import INTERRUPTED
from outstride.errors import OutstrideError

if TYPE_CHECKING:
    from outstride.bench.suite import SuitePart

FOLDER = "bench/results"


def add(kinds: Any) -> None:
    """Adds the commands."""
    whole = kinds.add_parser(
        "all",
        help="all benchmarks, and a page with their results",
        description="Runs every benchmark in a process of its own, writes a result file for each and "
        "a self-contained report.html. A part that fails is named and left out; after Ctrl-C the page "
        "shows what was measured until then. Results of other parts in the folder are kept and shown "
        "too.",
        allow_abbrev=False,
    )
    add_model_options(whole)
    whole.add_argument(
        "--folder", type=Path, default=Path(FOLDER), help=f"where to write (default {FOLDER})"
    )
    whole.add_argument(
        "--quick", action="store_true", help="small runs of every part, to see whether they work"
    )
    whole.add_argument("--only", default="", metavar="NAMES", help="only these parts")
    whole.add_argument("--gsm8k", metavar="FILE", help="questions for the quality part")
    whole.add_argument("--humaneval", metavar="FILE", help="functions for the quality part")
    whole.add_argument(
        "--quality-methods",
        default="auto",
        metavar="NAMES",
        help="methods of the quality part (default auto)",
    )
    whole.set_defaults(action=run_all)
    report = kinds.add_parser(
        "report",
        help="a page, and the tables of a Markdown file, from result files",
        description="Writes report.html from the result files of a folder. --keep writes them without "
        "their samples into another folder, small enough for a repository; --tables rewrites the "
        "tables between the markers of a Markdown file.",
        allow_abbrev=False,
    )
    report.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(FOLDER),
        metavar="FOLDER",
        help=f"folder of result files (default {FOLDER})",
    )
    report.add_argument("--out", type=Path, help="the page (default FOLDER/report.html)")
    report.add_argument("--keep", type=Path, metavar="FOLDER", help="folder for the small copies")
    report.add_argument("--tables", type=Path, metavar="FILE", help="a Markdown file with markers")
    report.set_defaults(action=run_report)


def run_report(args: argparse.Namespace, context: Context) -> int:
    """Writes the page."""
    from outstride.bench.report import page, readme

    del context
    print(page.write(args.folder, args.out or args.folder / "report.html"))
    if args.keep is not None:
        readme.keep(args.folder, args.keep)
    if args.tables is not None:
        readme.rewrite(args.tables, args.keep or args.folder)
    return 0


def run_all(args: argparse.Namespace, context: Context) -> int:
    """Runs all parts."""
    from outstride.bench import harness, suite
    from outstride.bench.report import page

    del context  # every part loads its own model
    options = suite.SuiteOptions(
        model=args.model,
        device=args.device,
        weights=args.weights,
        quick=args.quick,
        only=tuple(args.only.split()),
        gsm8k=args.gsm8k,
        humaneval=args.humaneval,
        methods=args.quality_methods,
    )
    planned = suite.parts(options)
    args.folder.mkdir(parents=True, exist_ok=True)
    for part in planned:  # results of an earlier run must not be taken for this one's
        (args.folder / f"{part.name}.json").unlink(missing_ok=True)
    remaining, failed, interrupted = suite.RemainingTime(planned), list[str](), False
    begin = time.monotonic()
    with harness.terminable():
        for number, part in enumerate(planned, start=1):
            left = "" if args.quick else f", {suite.in_words(remaining.left)} left"
            _say(f"{number} of {len(planned)}: {part.name}{left}")
            start = time.monotonic()
            try:
                code = _run(part, args.folder, options.model, options.weights, options.device)
            except KeyboardInterrupt:
                code = INTERRUPTED
            except OutstrideError as error:
                _say(f"{part.name}: {error}")
                code = 1
            remaining.done(part, time.monotonic() - start)
            if code == INTERRUPTED:
                interrupted = True
                break
            if code:
                failed.append(part.name)
    if any(args.folder.glob("*.json")):
        print(page.write(args.folder, args.folder / "report.html"))
    _say(f"took {suite.in_words(time.monotonic() - begin)}")
    if failed:
        _say(f"failed: {', '.join(failed)}")
    return INTERRUPTED if interrupted else int(bool(failed))


def _run(part: SuitePart, folder: Path, model: str, weights: str, device: str) -> int:
    """One part, with a server if it needs one; its printed tables are not shown."""
    from contextlib import nullcontext

    from outstride.bench import suite

    log = folder / "server.log"
    server = suite.serving(model, weights, log, device) if part.served else nullcontext(None)
    with server as url:
        child = subprocess.Popen(suite.command(part, folder, url), stdout=subprocess.DEVNULL)
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.terminate()  # the child gets Ctrl-C itself, but not SIGTERM
            child.wait()
            raise


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
