"""`outstride bench parallel`: policies for masked models on list tasks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import (
    Context,
    add_adapter_option,
    add_model_options,
    check_method,
    loaded,
)
from outstride.cli.outcome import conduct, output

if TYPE_CHECKING:
    from outstride.bench.parallel import ParallelReport


def add(kinds: Any) -> None:
    """Adds the command."""
    parallel = kinds.add_parser(
        "parallel",
        help="exact match against tokens per pass of policies for masked models",
        description="Answers list tasks with a small masked model by several policies: exact match, "
        "tokens per pass, passes, nodes and seconds. The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(parallel)
    add_adapter_option(parallel)
    parallel.set_defaults(model="parallel-full")
    parallel.add_argument(
        "--policies",
        metavar="NAMES",
        help="methods besides steps, with spaces between them: 'verify threshold:threshold=0.8' "
        "(default: all that settle several tokens per pass)",
    )
    parallel.add_argument(
        "--tasks", metavar="NAMES", help="tasks, with spaces between them (default: all)"
    )
    parallel.add_argument(
        "--limit", type=int, default=20, metavar="N", help="questions of each task (default 20)"
    )
    parallel.add_argument(
        "--batch", type=int, default=1, metavar="N", help="batch size (default 1)"
    )
    parallel.add_argument("--plot", metavar="FILE", help="plot the trade-off as an SVG file")
    output(parallel)
    parallel.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Compares policies for masked models on list tasks."""
    from pathlib import Path

    from outstride.bench import parallel, tradeoff
    from outstride.bench.result import BenchResult
    from outstride.models.shipped.lists import TASKS

    policies = parallel.POLICIES if args.policies is None else tuple(args.policies.split())
    for spec in policies:
        check_method(spec)
    tasks = tuple(TASKS) if args.tasks is None else tuple(args.tasks.split())
    settings = {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "policies": policies,
        "tasks": tasks,
        "limit": args.limit,
        "batch": args.batch,
    }
    result, report = BenchResult("parallel", settings), parallel.ParallelReport()
    with loaded(args, context) as llm:
        settings["fingerprint"] = llm.fingerprint
        code = conduct(
            args,
            result,
            report,
            lambda progress: parallel.measure(
                llm,
                policies,
                tasks=tasks,
                limit=args.limit,
                batch=args.batch,
                report=report,
                progress=progress,
            ),
            lambda: _print(report),
            message="answers",
        )
    if args.plot is not None and report.measured:
        title = f"{args.model}: exact match against tokens per pass"
        Path(args.plot).write_text(tradeoff.svg(report, title), encoding="utf-8")
    return code


def _print(report: ParallelReport) -> None:
    from rich.table import Table

    console = screen.console()
    for heading, value in (
        ("exact match, %", "{line.match:.0f}"),
        ("tokens per pass", "{line.tokens_per_pass:.1f}"),
    ):
        table = Table(box=None, pad_edge=False)
        table.add_column(heading, no_wrap=True)
        for task in report.measured:
            table.add_column(task, justify="right")
        for policy in report.policies:
            table.add_row(policy, *(value.format(line=line) for line in report.of(policy)))
        console.print(table)
        console.print()
    costs = Table(box=None, pad_edge=False)
    costs.add_column("all tasks")
    costs.add_column("exactness")
    for name in ("match", "tokens/pass", "equal", "passes", "x fewer", "nodes", "seconds"):
        costs.add_column(name, justify="right")
    for total in report.totals():
        costs.add_row(
            total.policy,
            total.exactness,
            f"{total.match:.1f}",
            f"{total.tokens_per_pass:.2f}",
            f"{total.equal}/{total.cases}",
            str(total.passes),
            f"{total.fewer:.2f}",
            str(total.nodes),
            f"{total.seconds:.2f}",
        )
    console.print(costs)
    console.print(
        "equal: answers that equal those of steps token for token (with the same order, for a policy "
        "that is exact to it); x fewer: passes of steps divided by passes of the policy",
        style="dim",
    )
    for policy, reason in report.skipped.items():
        console.print(f"left out: {policy}: {reason}", style="yellow")
    console.print()
