"""`outstride prove`: hold a method to its promise on prompts of your own."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outstride.cli import sampling, screen
from outstride.cli.bench import deliver, output
from outstride.cli.context import Context, add_model_options, check_method

if TYPE_CHECKING:
    from rich.console import Console

    from outstride.bench.prove import Divergence, ProofCase, ProofReport, Side


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "prove",
        help="check a method against plain decoding",
        description="Runs prompts under plain decoding and under a method, in batches and alone, "
        "and compares them token for token. Exits with 1 if an exact method differs.",
        allow_abbrev=False,
    )
    parser.add_argument("--method", required=True, help="name or name:key=value,…")
    add_model_options(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help=".txt (one prompt per line) or .jsonl (Spec-Bench, GSM8K, HumanEval or objects with "
        "prompt), also packed with gzip; without it, a dozen built-in ones",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only N prompts, spread evenly over the file"
    )
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="prompts at a time (default 8)"
    )
    parser.add_argument(
        "--alone",
        type=int,
        default=3,
        metavar="N",
        help="how many prompts to run again one by one (default 3)",
    )
    parser.add_argument("--raw", action="store_true", help="prompts as they are; no chat template")
    output(parser)
    sampling.add(parser, without=("logprobs",), max_tokens=128)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Proves, or shows where the texts part."""
    from outstride.bench import prompts
    from outstride.bench.prove import prove
    from outstride.bench.result import BenchResult
    from outstride.errors import InvalidParams

    params = sampling.params_of(args)
    check_method(args.method)
    if args.limit is not None and args.limit < 1:
        raise InvalidParams("--limit must be at least 1")
    listed = prompts.read_prompts(args.prompts) if args.prompts else prompts.built_in()
    listed = prompts.spread(listed, args.limit)
    with context.load(args.model, args.weights) as llm:
        result = BenchResult("prove", {"model": llm.name, "fingerprint": llm.fingerprint})
        with screen.bar(f"proving {args.method}") as progress:
            report = prove(
                llm,
                args.method,
                listed,
                params,
                batch=args.batch,
                raw=args.raw,
                alone=args.alone,
                progress=progress,
            )
    result.settings |= {
        "method": report.method,
        "prompts": args.prompts or "built-in",
        "limit": args.limit,
        "batch": report.batch,
        "alone": report.alone,
        "raw": args.raw,
        "params": asdict(report.params),
    }
    result.finish(report.samples(), report.summary())
    deliver(result, args)
    if args.json:
        print(result.to_json(), flush=True)
    else:
        _print(report)
    return 1 if report.broken else 0


def _print(report: ProofReport) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("group")
    for name in ("prompts", "equal", "tokens per pass", "accepted", "of proposed"):
        table.add_column(name, justify="right")
    for name, group in report.groups.items():
        table.add_row(
            name,
            str(group.prompts),
            str(group.equal),
            f"{group.tokens_per_pass:.2f}",
            f"{group.accepted}/{group.proposed}",
            f"{group.acceptance:.0%}" if group.proposed else "-",
        )
    total = report.total
    table.add_section()
    table.add_row(
        "mean over groups",
        str(total.prompts),
        str(total.equal),
        f"{report.tokens_per_pass:.2f}",
        f"{total.accepted}/{total.proposed}",
        f"{total.acceptance:.0%}" if total.proposed else "-",
        style="bold",
    )
    console = screen.console()
    console.print(table)
    for case in report.different:
        _print_case(console, case)
    if skipped := [case for case in report.cases if case.error is not None]:
        console.print(
            f"{len(skipped)} of {len(report.cases)} prompts could not be answered by either, "
            f"the first: {skipped[0].error}",
            style="yellow",
            markup=False,
        )
    _print_verdict(console, report)


def _print_case(console: Console, case: ProofCase) -> None:
    console.print(f"prompt {case.prompt.id} ({case.prompt.group}) differs:", markup=False)
    if case.failure is not None:
        console.print(f"  {case.failure}", markup=False, soft_wrap=True)
    for divergence in case.divergences:
        _print_divergence(console, divergence)
    console.print()


def _side(side: Side, finish: str | None) -> str:
    if side.token is None:
        return f"the end of the answer ({finish})"
    said = f"token {side.token} {screen.token_text(side.text)!r}"
    return said if side.logit is None else f"{said}, logit {side.logit:.6f}, rank {side.rank}"


def _print_divergence(console: Console, found: Divergence) -> None:
    how = "in a batch" if found.company == "batch" else "alone"
    sample = f", sample {found.sample}" if found.sample else ""
    lines = [
        f"output token {found.position}{sample}, {how}, "
        f"behind …{screen.token_text(found.before)!r}",
        f"  plain:  {_side(found.plain, found.finish[0])}",
        f"  method: {_side(found.other, found.finish[1])}",
    ]
    if found.gap is not None:
        lines.append(f"  gap between their raw logits: {found.gap:.6f}")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _print_verdict(console: Console, report: ProofReport) -> None:
    total = report.total
    prompts = "1 prompt" if total.prompts == 1 else f"{total.prompts} prompts"
    if report.equal:
        text = f"{report.method}: equal on all {prompts}"
        if report.alone:
            text += f" ({report.alone} of them also alone)"
        style = "bold green"
    else:
        count = total.prompts - total.equal
        text = f"{report.method}: different on {count} of {prompts}"
        if report.broken:
            text += "; it is declared exact, so this is a fault"
            style = "bold red"
        else:
            text += f"; it is declared {report.exactness.value} and may differ"
            style = "bold yellow"
    console.print(text, style=style, markup=False, soft_wrap=True)
