"""`outstride bench peers`: compares engines on the same machine, in the same run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.bench_decode import methods_of
from outstride.cli.context import Context, add_model_options
from outstride.cli.outcome import conduct, numbers, output

if TYPE_CHECKING:
    from outstride.bench.peers.engine_comparison import EngineComparisonReport


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = kinds.add_parser(
        "peers",
        help="compare with llama.cpp, transformers, vLLM and OpenVINO GenAI, where installed",
        description="Runs every installed engine on the same prompts, in turns: the same tokens in, "
        "the same number of tokens out, greedy, the same number of threads, at its best documented "
        "settings, which the result shows. Also measures the cost of a pass over several tokens, where "
        "an engine has such a call. Missing engines are listed and left out. The last line is one "
        "JSON object.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    parser.add_argument(
        "--methods",
        default="plain auto",
        metavar="NAMES",
        help="our own methods, with spaces between them (default 'plain auto')",
    )
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        help="only these, with spaces between them: llama.cpp transformers vllm openvino",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="FOLDER",
        help="folder of the virtual environments vllm and openvino (default: those that `make peers` "
        "creates; without one, the current environment)",
    )
    _add_sizes(parser)
    output(parser)
    parser.set_defaults(action=run)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds prompts, batch sizes, passes and rounds."""
    parser.add_argument(
        "--prompts", metavar="FILE", help="as for prove (default: the shipped ones)"
    )
    parser.add_argument(
        "--limit", type=int, default=8, metavar="N", help="prompts, spread evenly (default 8)"
    )
    parser.add_argument(
        "--batch",
        type=numbers,
        default=[1, 8],
        metavar="N,N,…",
        help="batch sizes (default 1,8)",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens of each answer (default 64)"
    )
    parser.add_argument(
        "--nodes",
        type=numbers,
        default=[1, 2, 4, 8, 16, 32, 64],
        metavar="N,N,…",
        help="tokens in a pass (default 1,2,4,8,16,32,64)",
    )
    parser.add_argument(
        "--cached",
        type=int,
        default=128,
        metavar="N",
        help="cached tokens before them (default 128)",
    )
    parser.add_argument(
        "--repeat", type=int, default=7, metavar="N", help="runs of each pass (default 7)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="runs of each prompt (default 1)"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Compares engines."""
    from outstride.bench import comparison_rows, prompts
    from outstride.bench.peers import engine_comparison
    from outstride.bench.peers.peer import PeerSetup
    from outstride.bench.result import BenchResult
    from outstride.errors import InvalidParams
    from outstride.models.load import locate

    if min([args.limit, args.tokens, args.repeat, args.rounds, *args.batch, *args.nodes]) < 1:
        raise InvalidParams("--limit, --batch, --tokens, --nodes, --repeat, --rounds start at 1")
    names = list(engine_comparison.PEERS) if args.peers is None else args.peers.split()
    if unknown := [name for name in names if name not in engine_comparison.PEERS]:
        raise InvalidParams(
            f"there is no peer {unknown[0]!r}; known are {', '.join(engine_comparison.PEERS)}"
        )
    methods = methods_of(args.methods)
    listed = prompts.read_prompts(args.prompts) if args.prompts else prompts.shipped()
    listed = prompts.spread(listed, args.limit)
    plan = engine_comparison.ComparisonPlan(
        output=args.tokens,
        batches=tuple(args.batch),
        nodes=tuple(args.nodes),
        cached=args.cached,
        rounds=args.rounds,
        passes=args.repeat,
    )
    settings = _settings(args, methods, names)
    path = locate(args.model)
    result, report = BenchResult("peers", settings), engine_comparison.EngineComparisonReport()
    with context.load(args.model, args.device, args.weights) as llm:
        settings["fingerprint"] = llm.fingerprint
        longest = max(len(llm.encode(p.text, chat=True)) for p in listed) + args.tokens
        setup = PeerSetup(
            path=path,
            vocabulary=llm.model.vocab_size,
            threads=comparison_rows.cores(),
            max_length=max(longest, args.cached + max(args.nodes)) + 2,
            max_batch=max(args.batch),
            environments=args.environments,
        )
        return conduct(
            args,
            result,
            report,
            lambda progress: engine_comparison.compare_engines(
                llm, setup, methods, names, listed, plan, report=report, progress=progress
            ),
            lambda: _print(report),
            message="engines in turns",
        )


def _settings(args: argparse.Namespace, methods: list[str], names: list[str]) -> dict[str, Any]:
    """The settings of the result."""
    from outstride.bench import comparison_rows
    from outstride.bench.peers import start

    return {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "methods": methods,
        "peers": names,
        "prompts": args.prompts or "shipped",
        "limit": args.limit,
        "batch": args.batch,
        "tokens": args.tokens,
        "nodes": args.nodes,
        "cached": args.cached,
        "repeat": args.repeat,
        "rounds": args.rounds,
        "threads": comparison_rows.cores(),
        "load average": start.load_average(),
    }


def _print(report: EngineComparisonReport) -> None:
    from rich.table import Table

    console, summary = screen.console(), report.summary()
    for heading, key, unit in (
        ("Tokens per second, prompts included", "tokens_per_second", "at a time"),
        ("Milliseconds of a pass", "milliseconds", "tokens"),
    ):
        found = summary[key]
        columns = sorted({int(c) for mine in found.values() for c in mine})
        table = Table(box=None, pad_edge=False)
        table.add_column(unit)
        for column in columns:
            table.add_column(str(column), justify="right")
        for name, mine in found.items():
            cells = (f"{mine[str(c)]:.1f}" if str(c) in mine else "" for c in columns)
            table.add_row(name, *cells)
        console.print(f"\n{heading}", style="italic")
        console.print(table)
    console.print()
    for name, mine in report.settings.items():
        told = ", ".join(f"{key} {value}" for key, value in mine.items())
        console.print(f"{name}: {told}", style="dim", markup=False, soft_wrap=True)
    for name, reason in report.skipped.items():
        console.print(f"left out: {name}: {reason}", style="yellow", markup=False)
    console.print()
