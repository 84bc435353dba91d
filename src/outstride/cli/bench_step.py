"""`outstride bench step`: the cost of passes, alone, against llama.cpp, or on a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import Context, add_model_options
from outstride.cli.outcome import conduct, numbers, output

if TYPE_CHECKING:
    from outstride.bench.comparison_rows import PeerReport
    from outstride.bench.result import BenchResult
    from outstride.bench.step import StepReport


def add(kinds: Any) -> None:
    """Adds the command."""
    step = kinds.add_parser(
        "step",
        help="cost of one pass of the model",
        description="Times one pass of the model against the number of nodes, against cached "
        "length, and for several sequences at once. The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(step)
    step.add_argument(
        "--nodes",
        type=numbers,
        default=[1, 2, 4, 8, 16, 32, 64],
        metavar="N,N,…",
        help="numbers of nodes in a pass (default 1,2,4,8,16,32,64)",
    )
    step.add_argument(
        "--cached",
        type=int,
        default=128,
        metavar="N",
        help="cached tokens before them (default 128)",
    )
    step.add_argument(
        "--lengths",
        type=numbers,
        default=[0, 128, 512, 1024, 2048],
        metavar="N,N,…",
        help="cached lengths before one node (default 0,128,512,1024,2048)",
    )
    step.add_argument(
        "--sequences",
        type=numbers,
        default=[1, 4, 16],
        metavar="N,N,…",
        help="numbers of sequences with one node each (default 1,4,16)",
    )
    step.add_argument(
        "--repeat", type=int, default=7, metavar="N", help="runs of each, in turns (default 7)"
    )
    step.add_argument(
        "--against",
        choices=("llama.cpp", "transformers"),
        help="compare with llama.cpp on the same GGUF file instead: passes, generation, start, "
        "memory and host work, with bounds; transformers: measure an NVIDIA GPU instead, against "
        "transformers and with bounds",
    )
    output(step)
    step.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Measures passes."""
    if args.against == "transformers":
        return run_gpu(args)
    if args.against is not None:
        return run_against(args, context)
    from outstride.bench import step
    from outstride.bench.result import BenchResult

    wanted = step.cases(args.nodes, args.cached, args.lengths, args.sequences)
    with context.load(args.model, args.device, args.weights) as llm:
        settings = {
            "model": llm.name,
            "fingerprint": llm.fingerprint,
            "nodes": args.nodes,
            "cached": args.cached,
            "lengths": args.lengths,
            "sequences": args.sequences,
            "repeat": args.repeat,
            "warmups": 1,
        }
        result, report = BenchResult("step", settings), step.StepReport()
        return conduct(
            args,
            result,
            report,
            lambda progress: step.measure(
                llm.engine.idle_runner(),
                wanted,
                repeat=args.repeat,
                report=report,
                progress=progress,
            ),
            lambda: _print(report, result),
            message="passes",
        )


def _print(report: StepReport, result: BenchResult) -> None:
    from rich.table import Table

    console = screen.console()
    machine, settings = result.machine, result.settings
    console.print(
        f"[bold]One pass of {settings['model']}[/bold]: median of {settings['repeat']}, in "
        f"milliseconds, on {machine['accelerator'] or machine['cpu']}, {machine['cores']} cores"
    )
    headings = {
        "nodes": f"A chain of nodes after {settings['cached']} cached tokens",
        "cached": "One node after cached tokens",
        "sequences": f"One node each for several sequences after {settings['cached']} cached tokens",
    }
    for sweep, heading in headings.items():
        rows = [
            (case, series)
            for case, series in report.series.items()
            if case.sweep == sweep and series.seconds
        ]
        if not rows:
            continue
        table = Table(box=None, pad_edge=False)
        for name in (sweep, "ms", "spread", "x first", "ms per node"):
            table.add_column(name, justify="right")
        first = rows[0][1].median
        for case, series in rows:
            table.add_row(
                str(case.value),
                f"{series.median * 1e3:.2f}",
                f"{series.spread * 1e3:.2f}",
                f"{series.median / first:.2f}",
                f"{series.median * 1e3 / (case.nodes * case.sequences):.2f}",
            )
        console.print(f"\n{heading}", style="italic")
        console.print(table)
    for case, reason in report.skipped.items():
        console.print(f"left out: {case.sweep} {case.value}: {reason}", style="yellow")
    if any(s.spread > s.median / 3 for s in report.series.values() if s.seconds):
        console.print("durations vary by a third or more: is the machine busy?", style="yellow")
    console.print()


# --- against llama.cpp -----------------------------------------------------------------------------


def run_against(args: argparse.Namespace, context: Context) -> int:
    """Measures passes and generation against llama.cpp."""
    from outstride.bench import comparison_rows, host
    from outstride.bench.peers import llama_cpp, llama_cpp_comparison, start
    from outstride.bench.result import BenchResult

    path = llama_cpp_comparison.gguf_of(args.model)
    llama_cpp.library()  # a missing package is reported before a model is loaded
    settings = {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "against": args.against,
        "file": path.name,
        "threads": comparison_rows.cores(),
        "repeat": args.repeat,
        "load average": start.load_average(),
    }
    result, report = BenchResult("against", settings), comparison_rows.PeerReport()
    command = [sys.executable, "-m", "outstride.cli", "run", "Why is the sky blue?"]
    command += [
        "--model",
        args.model,
        "--device",
        args.device,
        "--weights",
        args.weights,
        "--max-tokens",
        "1",
    ]
    started = start.start(command)  # before this process has a model of its own
    with context.load(args.model, args.device, args.weights) as llm:
        settings |= {"fingerprint": llm.fingerprint}

        def measure(progress: Any) -> None:
            llama_cpp_comparison.compare(
                llm, path, repeat=args.repeat, report=report, progress=progress
            )
            report.rows += [*started, *host.host(llm)]
            settings["load average at the end"] = start.load_average()

        return conduct(
            args,
            result,
            report,
            measure,
            lambda: _print_rows(report, result),
            message="both engines in turns",
        )


def run_gpu(args: argparse.Namespace) -> int:
    """Measures an NVIDIA GPU."""
    from outstride.bench import comparison_rows, gpu
    from outstride.bench.peers import start
    from outstride.bench.result import BenchResult

    settings = {
        "model": args.model,
        "against": "transformers",
        "threads": comparison_rows.cores(),
        "load average": start.load_average(),
    }
    result = BenchResult("gpu", settings)
    report = comparison_rows.PeerReport(peer={"version": "transformers"})

    def measure(progress: Any) -> None:
        gpu.compare(args.model, report, progress=progress)
        settings["load average at the end"] = start.load_average()

    return conduct(
        args, result, report, measure, lambda: _print_rows(report, result), message="parts"
    )


def _print_rows(report: PeerReport, result: BenchResult) -> None:
    from rich.table import Table

    console = screen.console()
    machine, settings = result.machine, result.settings
    console.print(
        f"[bold]{settings['model']} against {settings['against']} {report.peer['version']}[/bold]: "
        f"medians of runs in turns, {settings['threads']} threads each, on {machine['cpu']}; load "
        f"average {settings['load average'][:1]} before, "
        f"{settings.get('load average at the end', [])[:1]} after"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("ours", "theirs", "", "ratio", "must be", ""):
        table.add_column(name, justify="right" if name else "left")
    for row in report.rows:
        judged = {None: "", True: "met", False: "[red]not met[/red]"}[row.met]
        table.add_row(
            row.name,
            f"{row.ours:.2f}",
            "" if row.theirs is None else f"{row.theirs:.2f}",
            row.unit if row.other in ("", "llama.cpp") else f"{row.unit} ({row.other})",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.bound is None else str(row.bound),
            judged,
        )
    console.print(table)
    for name, reason in report.skipped.items():
        console.print(f"left out: {name}: {reason}", style="yellow")
    console.print()
