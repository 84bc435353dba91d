"""`outstride bench step`: the cost of passes, alone, against llama.cpp, or on a GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import Context, add_model_options
from outstride.cli.outcome import conduct, numbers, output

if TYPE_CHECKING:
    from outstride.bench.comparison_rows import PeerReport
    from outstride.bench.peers.llama_cpp_comparison import Sizes
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
        metavar="N,N,…",
        help="numbers of nodes in a pass (default 1,2,4,8,16,32,64; against llama.cpp 1,4,8,16)",
    )
    step.add_argument(
        "--cached",
        type=int,
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
    _add_against(step)
    output(step)
    step.set_defaults(action=run)


def _add_against(step: argparse.ArgumentParser) -> None:
    """Adds the comparison with another engine."""
    step.add_argument(
        "--against",
        choices=("llama.cpp", "transformers"),
        help="compare with llama.cpp on the same GGUF file instead: passes, prompts, generation, "
        "start, memory and host work, with bounds; where OUTSTRIDE_ISA forces an instruction set, "
        "with llama.cpp built for it (`make llama ISA=avx2`); transformers: measure an NVIDIA GPU "
        "instead, against transformers and with bounds",
    )
    step.add_argument(
        "--only",
        default="",
        metavar="NAMES",
        help="against llama.cpp: only these parts, with spaces between them: passes sequences long "
        "prompts requests start host",
    )
    step.add_argument(
        "--prompts",
        type=numbers,
        metavar="N,N,…",
        help="against llama.cpp: lengths of prompts (default 1024,4096,8185)",
    )
    step.add_argument(
        "--environments",
        type=Path,
        metavar="FOLDER",
        help="folder of the environments of llama.cpp's builds for one instruction set, such as "
        "llama-avx2 (default: those that `make llama` creates)",
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Measures passes."""
    if args.against == "transformers":
        return run_gpu(args)
    if args.against is not None:
        return run_against(args, context)
    from outstride.bench import step
    from outstride.bench.peers import bounds
    from outstride.bench.result import BenchResult

    nodes = args.nodes or list(step.NODES)
    cached = step.CACHED if args.cached is None else args.cached
    wanted = step.cases(nodes, cached, args.lengths, args.sequences)
    with context.load(args.model, args.device, args.weights) as llm:
        settings = {
            "model": llm.name,
            "fingerprint": llm.fingerprint,
            "ours": bounds.our_build(llm),
            "nodes": nodes,
            "cached": cached,
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
        f"milliseconds, on {machine['accelerator'] or machine['cpu']}, {machine['cores']} cores; "
        f"{settings['ours']}"
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
    from dataclasses import asdict

    from outstride.bench import comparison_rows, host
    from outstride.bench.peers import bounds, llama_cpp, llama_cpp_comparison, start
    from outstride.bench.result import BenchResult

    parts, sizes = _against_parts(args.only), _against_sizes(args)
    path = llama_cpp_comparison.gguf_of(args.model)
    llama_cpp.library(args.environments)  # a missing build is reported before a model is loaded
    settings = {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "against": args.against,
        "file": path.name,
        "parts": parts,
        "sizes": asdict(sizes),
        "threads": comparison_rows.cores(),
        "repeat": args.repeat,
        "load average": start.load_average(),
    }
    result, report = BenchResult("against", settings), comparison_rows.PeerReport()
    started = start.start(_first_answer(args)) if "start" in parts else []
    with context.load(args.model, args.device, args.weights) as llm:
        settings |= {"fingerprint": llm.fingerprint, "ours": bounds.our_build(llm)}

        def measure(progress: Any) -> None:
            llama_cpp_comparison.compare(
                llm,
                path,
                parts=parts,
                repeat=args.repeat,
                sizes=sizes,
                environments=args.environments,
                report=report,
                progress=progress,
            )
            for row in started:
                row.bound = row.bound if bounds.bounds_of(llm).start else None
            report.rows += [*started, *(host.host(llm) if "host" in parts else ())]
            settings["load average at the end"] = start.load_average()

        return conduct(
            args,
            result,
            report,
            measure,
            lambda: _print_rows(report, result),
            message="both engines in turns",
        )


def _against_parts(text: str) -> list[str]:
    """The parts of `--only`, or all of them."""
    from outstride.bench.peers.llama_cpp_comparison import PARTS
    from outstride.errors import InvalidParams

    parts = text.replace(",", " ").split()
    if unknown := [part for part in parts if part not in PARTS]:
        raise InvalidParams(f"there is no part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    return parts or list(PARTS)


def _against_sizes(args: argparse.Namespace) -> Sizes:
    """The sizes of the cases, with those of the command line."""
    from dataclasses import replace

    from outstride.bench.peers import llama_cpp_comparison

    given: dict[str, Any] = {}
    if args.cached is not None:
        given["cached"] = args.cached
    for name in ("nodes", "prompts"):
        if listed := getattr(args, name):
            given[name] = tuple(listed)
    return replace(llama_cpp_comparison.Sizes(), **given)


def _first_answer(args: argparse.Namespace) -> list[str]:
    """A command that starts a process, loads the model and prints one token."""
    command = [sys.executable, "-m", "outstride.cli", "run", "Why is the sky blue?"]
    command += ["--model", args.model, "--device", args.device, "--weights", args.weights]
    return [*command, "--max-tokens", "1"]


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
    if "enabled" in report.peer:
        console.print(
            f"ours: {settings['ours'] or 'unknown'}; {settings['against']}: "
            f"{report.peer['enabled'] or report.peer['build']}",
            style="dim",
            markup=False,
            soft_wrap=True,
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
