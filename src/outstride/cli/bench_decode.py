"""`outstride bench decode`: compares methods on the same prompts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from outstride.cli import sampling, screen
from outstride.cli.context import (
    Context,
    add_adapter_option,
    add_model_options,
    check_method,
    loaded,
)
from outstride.cli.outcome import conduct, decimals, numbers, output

if TYPE_CHECKING:
    from rich.table import Table

    from outstride.bench.decode import DecodeLine, DecodeReport
    from outstride.bench.result import BenchResult

EXACT = "exact"


def add(kinds: Any) -> None:
    """Adds the command."""
    decode = kinds.add_parser(
        "decode",
        help="compare methods on the same prompts",
        description="Answers prompts with several methods in turns: tokens per pass, tokens per "
        "second, speed-up over plain, and time by verb. The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(decode)
    add_adapter_option(decode)
    decode.add_argument(
        "--methods",
        default="auto",
        metavar="NAMES",
        help="methods besides plain, with spaces between them: 'auto ngram:length=4'; exact stands for "
        "every exact method that needs nothing but the model (default auto)",
    )
    decode.add_argument(
        "--prompts",
        metavar="FILE",
        help="as for prove (default: the 41 shipped prompts)",
    )
    decode.add_argument(
        "--limit", type=int, metavar="N", help="only N prompts, spread evenly over the file"
    )
    decode.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="N more prompts with unpredictable answers (default 0)",
    )
    _add_runs(decode)
    output(decode)
    sampling.add(decode, without=("logprobs", "temperature"), max_tokens=160)
    decode.set_defaults(action=run)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    """Adds batch sizes, temperatures, the cost curve and rounds."""
    parser.add_argument(
        "--batch",
        type=numbers,
        default=[1],
        metavar="N,N,…",
        help="batch sizes, measured one after the other (default 1)",
    )
    parser.add_argument(
        "--temperature",
        type=decimals,
        default=[0.0],
        metavar="X,X,…",
        help="temperatures, measured one after the other; 0 is greedy (default 0)",
    )
    parser.add_argument(
        "--cost",
        metavar="CURVE",
        help="fixed cost curve: milliseconds by nodes (1=6,8=10,64=50), or a result file of an earlier "
        "run; auto then drafts the same on every machine (default: measured)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="how often to run everything (default 1)"
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="one more round in which drafters keep the memory of the first one",
    )
    parser.add_argument("--raw", action="store_true", help="prompts as they are; no chat template")


def methods_of(text: str) -> list[str]:
    """The requested methods; `exact` stands for all exact methods that need nothing but the model."""
    from outstride.bench.decode import exact_methods

    found = [m for word in text.split() for m in (exact_methods() if word == EXACT else [word])]
    for spec in found:
        check_method(spec)
    return list(dict.fromkeys(found))


def run(args: argparse.Namespace, context: Context) -> int:
    """Compares methods."""
    from dataclasses import asdict

    from outstride.bench import curve, prompts
    from outstride.bench.decode import DecodeReport, decode, incompressible
    from outstride.bench.result import BenchResult
    from outstride.errors import InvalidParams

    params = sampling.params_of(args)
    if min([*args.batch, args.rounds, 1 if args.limit is None else args.limit], default=0) < 1:
        raise InvalidParams("--limit, --batch and --rounds must be at least 1")
    if args.random < 0 or min(args.temperature, default=-1.0) < 0:
        raise InvalidParams("--random and --temperature must be at least 0")
    methods = methods_of(args.methods)
    frozen = None if args.cost is None else curve.read(args.cost)
    listed = prompts.read_prompts(args.prompts) if args.prompts else prompts.shipped()
    listed = prompts.spread(listed, args.limit)
    settings = {
        "model": args.model,
        "methods": methods,
        "prompts": args.prompts or "shipped",
        "limit": args.limit,
        "random": args.random,
        "batch": args.batch,
        "temperature": args.temperature,
        "rounds": args.rounds,
        "warm": args.warm,
        "raw": args.raw,
        "params": asdict(params),
        "frozen": frozen is not None,
    }
    result, report = BenchResult("decode", settings), DecodeReport()
    with loaded(args, context) as llm:
        settings["fingerprint"] = llm.fingerprint
        if frozen is not None:
            curve.freeze(llm, frozen)

        def measure(progress: Any) -> None:
            decode(
                llm,
                methods,
                [*listed, *incompressible(llm, args.random)],
                params,
                batches=args.batch,
                temperatures=args.temperature,
                rounds=args.rounds,
                warm=args.warm,
                raw=args.raw,
                report=report,
                progress=progress,
            )
            settings["cost"] = curve.of(llm)

        return conduct(
            args, result, report, measure, lambda: _print(report, result), message="answers"
        )


def _table(lines: list[DecodeLine]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    table.add_column("task")
    for name in ("equal", "tokens/pass", "nodes/pass", "tok/s", "x plain", "at least"):
        table.add_column(name, justify="right")
    for name in ("draft", "forward", "accept", "commit"):
        table.add_column(name, justify="right", style="dim")
    before = ""
    for line in lines:
        name = f"{line.method} (warm)" if line.warm else line.method
        if before and name != before:
            table.add_section()
        shares = {**line.shares, "draft": line.shares["propose"]}
        shares["commit"] += line.shares["plan"]
        table.add_row(
            name if name != before else "",
            line.group,
            f"{line.equal}/{line.prompts}",
            f"{line.tokens_per_pass:.2f}",
            f"{line.nodes_per_pass:.1f}",
            f"{line.tokens_per_second:.1f}",
            f"{line.ratio:.2f}",
            f"{line.bound:.2f}",
            *(f"{shares[verb]:.0%}" for verb in ("draft", "forward", "accept", "commit")),
            style="bold" if line.group == "all" else None,
        )
        before = name
    return table


def _print(report: DecodeReport, result: BenchResult) -> None:
    console = screen.console()
    machine, settings = result.machine, result.settings
    console.print(
        f"[bold]{settings['model']}[/bold], {settings['params']['max_tokens']} tokens, on "
        f"{machine['accelerator'] or machine['cpu']}"
    )
    lines = report.lines()
    for batch, temperature in dict.fromkeys((line.batch, line.temperature) for line in lines):
        console.print(f"\n{batch} at a time, temperature {temperature:g}", style="italic")
        console.print(
            _table([x for x in lines if (x.batch, x.temperature) == (batch, temperature)])
        )
    console.print(
        "x plain: time of plain divided by time of the method on the same prompts, mean over tasks; "
        "at least: lower end of its 95% interval; commit includes planning",
        style="dim",
    )
    console.print()
