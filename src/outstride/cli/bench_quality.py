"""`outstride bench quality`: correct answers and speed by method."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from outstride.cli import sampling, screen
from outstride.cli.bench_decode import methods_of
from outstride.cli.context import Context, add_adapter_option, add_model_options, loaded
from outstride.cli.outcome import conduct, output

if TYPE_CHECKING:
    from outstride.bench.quality import QualityReport


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = kinds.add_parser(
        "quality",
        help="scores on GSM8K and HumanEval, with tokens per pass",
        description="Answers the questions of files with several methods and their baselines: correct "
        "answers, tokens per pass, seconds. Code that the model writes runs in a process that can "
        "neither write files nor reach a network, with limits on time and memory. "
        "The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--methods",
        required=True,
        metavar="NAMES",
        help="methods, with spaces between them; the baseline of each is added",
    )
    parser.add_argument(
        "--gsm8k", metavar="FILE", help=".jsonl with question and answer (ending in #### number)"
    )
    parser.add_argument(
        "--humaneval",
        metavar="FILE",
        help=".jsonl with task_id, prompt, entry_point and test, also compressed with gzip",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only N questions of each file, evenly spaced"
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="batch size (default 8)")
    output(parser)
    sampling.add(parser, without=("logprobs", "n"), max_tokens=320)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Scores methods."""
    from dataclasses import asdict, replace

    from outstride.bench import quality
    from outstride.bench.prompts import spread
    from outstride.bench.result import BenchResult
    from outstride.errors import InvalidParams

    params = sampling.params_of(args)
    params = replace(params, seed=params.seed or 0)
    if min(args.batch, 1 if args.limit is None else args.limit) < 1:
        raise InvalidParams("--limit and --batch must be at least 1")
    methods = methods_of(args.methods)
    questions: list[quality.Question] = []
    if args.gsm8k:
        questions += spread(quality.gsm8k(args.gsm8k), args.limit)
    if args.humaneval:
        questions += spread(quality.humaneval(args.humaneval), args.limit)
    if not questions:
        raise InvalidParams("name a file of questions: --gsm8k FILE, --humaneval FILE, or both")
    settings = {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "methods": methods,
        "gsm8k": args.gsm8k,
        "humaneval": args.humaneval,
        "limit": args.limit,
        "batch": args.batch,
        "params": asdict(params),
    }
    result, report = BenchResult("quality", settings), quality.QualityReport()
    with loaded(args, context) as llm:
        settings["fingerprint"] = llm.fingerprint_of(params.adapter)
        return conduct(
            args,
            result,
            report,
            lambda progress: quality.measure(
                llm, methods, questions, params, batch=args.batch, report=report, progress=progress
            ),
            lambda: _print(report),
            message="answers",
        )


def _print(report: QualityReport) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    table.add_column("exactness")
    table.add_column("task")
    for name in ("right", "score, %", "95% interval", "equal", "tokens/pass", "seconds"):
        table.add_column(name, justify="right")
    for row in report.scores():
        low, high = row.interval
        table.add_row(
            row.method,
            row.exactness,
            row.task,
            f"{row.right}/{row.asked}",
            f"{row.score:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{row.equal}/{row.asked}",
            f"{row.tokens_per_pass:.2f}",
            f"{row.seconds:.1f}",
        )
    console = screen.console()
    console.print(table)
    console.print(
        "equal: answers that equal those of the method's baseline, token for token",
        style="dim",
    )
    console.print()
