"""`outstride prove`: check a method's declared exactness on your own prompts."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outstride.cli import sampling, screen
from outstride.cli.context import (
    Context,
    add_adapter_option,
    add_model_options,
    check_method,
    loaded,
)
from outstride.cli.outcome import deliver, output
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from rich.console import Console

    from outstride.bench.proof import Divergence, GroupCounts, ProofCase, ProofReport, Side

HELD, BROKEN, UNPROVED = 0, 1, 2
SHOWN = 5
"""Number of differing prompts that are printed; all of them are in the JSON object."""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "prove",
        help="check a method against plain decoding",
        description="Runs prompts under plain decoding and under a method: in batches, alone, and "
        "among other methods on so few pages that requests are preempted. Compares them token for "
        "token, and the log-probabilities bit for bit. A method that is exact in distribution is "
        "tested for that instead, at temperatures above 0.",
        epilog="exits with 0 if the declared exactness held, 1 if not, 2 if nothing could be tested "
        "(a wrong option, a file that cannot be read)",
        allow_abbrev=False,
    )
    parser.add_argument("--method", required=True, help="name or name:key=value,…")
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help=".txt (one prompt per line) or .jsonl (Spec-Bench, GSM8K, HumanEval or objects with "
        "prompt), also compressed with gzip; without it, built-in ones",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only N prompts, evenly spaced over the file"
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="batch size (default 8)")
    parser.add_argument(
        "--alone",
        type=int,
        default=3,
        metavar="N",
        help="how many prompts to run again one by one (default 3)",
    )
    parser.add_argument(
        "--no-mixed", action="store_true", help="leave out the run among other methods"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if any text differs, declared or not"
    )
    parser.add_argument("--raw", action="store_true", help="prompts as they are; no chat template")
    output(parser)
    sampling.add(parser, without=("logprobs",), max_tokens=128)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Compares, and shows where the texts diverge."""
    try:
        report, name = _prove(args, context)
    except (OutstrideError, OSError) as error:
        if screen.debugging():
            raise
        screen.report_error(error)
        return UNPROVED
    if not args.json:
        _print(report, name)
    failed = report.broken or (args.strict and not report.equal)
    return BROKEN if failed else HELD


def _prove(args: argparse.Namespace, context: Context) -> tuple[ProofReport, str]:
    from outstride.bench import prompts
    from outstride.bench.prove import prove
    from outstride.bench.result import BenchResult

    params = sampling.params_of(args)
    check_method(args.method)
    if args.limit is not None and args.limit < 1:
        raise InvalidParams("--limit must be at least 1")
    listed = prompts.read_prompts(args.prompts) if args.prompts else prompts.built_in()
    listed = prompts.spread(listed, args.limit)
    with loaded(args, context) as llm:
        result = BenchResult(
            "prove", {"model": llm.name, "fingerprint": llm.fingerprint_of(params.adapter)}
        )
        with screen.bar(f"proving {args.method}") as progress:
            report = prove(
                llm,
                args.method,
                listed,
                params,
                batch=args.batch,
                raw=args.raw,
                alone=args.alone,
                mixed=not args.no_mixed,
                progress=progress,
            )
    result.settings |= {
        "method": report.method,
        "prompts": args.prompts or "built-in",
        "limit": args.limit,
        "batch": report.batch,
        "alone": report.alone,
        "mixed": not args.no_mixed,
        "raw": args.raw,
        "params": asdict(report.params),
    }
    result.finish(report.samples(), report.summary())
    deliver(result, args)
    if args.json:
        print(result.to_json(), flush=True)
    return report, llm.name


# --- printing -----------------------------------------------------------------------------------


def _print(report: ProofReport, model: str) -> None:
    console = screen.console()
    _print_head(console, report, model)
    _print_groups(console, report)
    if report.distribution is None:
        _print_runs(console, report)
    else:
        _print_distribution(console, report)
    for case in report.different[:SHOWN]:
        _print_case(console, case, report.baseline)
    if (more := len(report.different) - SHOWN) > 0:
        console.print(f"and {more} more; --json lists all of them\n", style="dim")
    if skipped := [case for case in report.cases if case.error is not None]:
        console.print(
            f"{len(skipped)} of {len(report.cases)} prompts could not be answered by either, "
            f"the first: {skipped[0].error}",
            style="yellow",
            markup=False,
        )
    if report.integrity is not None:
        console.print(f"the KV cache is inconsistent: {report.integrity}", style="red")
    _print_verdict(console, report)


def _print_head(console: Console, report: ProofReport, model: str) -> None:
    params = report.params
    how = "greedy"
    if params.temperature > 0:
        how = f"temperature {params.temperature:g}, seed {params.seed}"
    console.print(
        f"{report.method} against {report.baseline} on {model}, {how}",
        style="bold",
        markup=False,
        soft_wrap=True,
    )


def _print_groups(console: Console, report: ProofReport) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    equality = report.distribution is None
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("group")
    names = ("prompts", "equal", "tokens per pass", "accepted", "of proposed")
    for name in names if equality else (n for n in names if n != "equal"):
        table.add_column(name, justify="right")

    def row(name: str, group: GroupCounts, tokens_per_pass: float, style: str = "") -> None:
        share = f"{group.acceptance:.0%}" if group.proposed else "-"
        cells = [name, str(group.prompts)] + ([str(group.equal)] if equality else [])
        cells += [f"{tokens_per_pass:.2f}", f"{group.accepted}/{group.proposed}", share]
        table.add_row(*cells, style=style)

    for name, group in report.groups.items():
        row(name, group, group.tokens_per_pass)
    table.add_section()
    row("mean over groups", report.total, report.tokens_per_pass, "bold")
    console.print(table)


def _print_runs(console: Console, report: ProofReport) -> None:
    """One line for each batch context, with the number of equal prompts."""
    answered = report.answered

    def line(name: str, batch_context: str, count: int, remark: str = "") -> None:
        cases = answered[:count]
        bad = sum(
            case.failure is not None
            or any(d.batch_context == batch_context for d in case.divergences)
            for case in cases
        )
        mark, style = ("✓", "green") if not bad else ("✗", "red")
        text = f"{mark} {name:<22}{len(cases) - bad} of {len(cases)} equal"
        console.print(f"[{style}]{text}[/{style}]{remark}", soft_wrap=True)

    line(f"in batches of {report.batch}", "batch", len(answered))
    if report.alone:
        line("alone", "alone", report.alone)
    if (mixed := report.mixed) is not None:
        others = ", ".join(mixed.methods)
        line(
            "among other methods",
            "mixed",
            len(answered),
            f"[dim]   {mixed.preempted} preemptions on {mixed.pages} pages; with {others}[/dim]",
        )
    console.print()


def _print_distribution(console: Console, report: ProofReport) -> None:
    from outstride.bench.chi_square import ALPHA, POWER

    found = report.distribution
    assert found is not None
    units = {"ranks": "tokens", "neighbours": "pairs", "samples": "pairs"}
    asks = {
        "ranks": "do likely and unlikely tokens occur as often as expected?",
        "neighbours": "are consecutive tokens independent, given the text?",
        "samples": "are answers to the same prompt independent?",
    }
    for test in found.tests:
        bad = test.p is not None and test.p < found.significance
        value = "not tested: too few" if test.p is None else f"p = {test.p:.3g}"
        mark = "✗" if bad else "✓" if test.p is not None else "–"
        style = "red" if bad else "green" if test.p is not None else "yellow"
        count = f"{test.count:,} {units[test.name]}"
        text = f"[{style}]{mark} {test.name:<12}{value:<22}[/{style}]{count:<16}"
        console.print(f"{text}[dim]{asks[test.name]}[/dim]", soft_wrap=True)
    if found.impossible:
        console.print(
            f"✗ {found.impossible} of {found.tokens:,} tokens have probability 0 under plain",
            style="red",
        )
    console.print()
    if found.shifted_share < 1:
        console.print(
            f"With {found.tokens:,} tokens, a rule that puts {found.shifted_share:.1%} of them at "
            f"wrong ranks, or takes the most likely token in {found.greedy_share:.1%} of cases "
            f"instead of sampling, is found with probability {POWER:.0%}; four times the tokens (--n, "
            f"--max-tokens) halve both figures. A correct rule fails in "
            f"{ALPHA:.0%} of proofs.\n",
            style="dim",
        )


def _print_case(console: Console, case: ProofCase, baseline: str) -> None:
    console.print(f"prompt {case.prompt.id} ({case.prompt.group}) differs:", markup=False)
    if case.failure is not None:
        console.print(f"  {case.failure}", markup=False, soft_wrap=True)
    if case.divergences:
        first, *rest = case.divergences
        _print_divergence(console, first, baseline)
        also: dict[tuple[str, int, bool], list[str]] = {}
        for other in rest:
            also.setdefault((other.method, other.position, other.bits), []).append(_where(other))
        for (method, position, bits), places in also.items():
            what = "the logits of output token" if bits else "output token"
            line = f"  also {' and '.join(places)}: {method}, {what} {position}"
            console.print(line, style="dim", markup=False, soft_wrap=True)
    console.print()


def _where(found: Divergence) -> str:
    how = {"batch": "in a batch", "alone": "alone", "mixed": "among other methods"}
    return how[found.batch_context] + (f", sample {found.sample}" if found.sample else "")


def _side(side: Side, finish: str | None, what: str) -> str:
    if side.token is None:
        return f"the end of the answer ({finish})"
    text = f"token {side.token} {screen.token_text(side.text)!r}"
    if side.logit is None:
        return text
    rank = "" if side.rank is None else f", rank {side.rank}"
    return f"{text}, {what} {side.logit:.9g}{rank}"


def _print_divergence(console: Console, found: Divergence, baseline: str) -> None:
    what = "log-probability" if found.bits else "logit"
    width = max(len(baseline), len(found.method)) + 1
    lines = [
        f"output token {found.position}, {_where(found)}, "
        f"after …{screen.token_text(found.before)!r}",
        f"  {baseline + ':':<{width}} {_side(found.plain, found.finish[0], what)}",
        f"  {found.method + ':':<{width}} {_side(found.other, found.finish[1], what)}",
    ]
    if found.bits:
        lines.append(f"  the tokens are equal, their logits differ: {found.logit_difference:.3g}")
    elif found.logit_difference is not None:
        lines.append(f"  difference of their raw logits: {found.logit_difference:.6f}")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


_ROUNDING = "; with this model methods are exact up to rounding: near ties may go either way"


def _print_verdict(console: Console, report: ProofReport) -> None:
    total = report.total
    prompts = "1 prompt" if total.prompts == 1 else f"{total.prompts} prompts"
    style = "bold red" if report.broken else "bold green"
    if report.distribution is not None:
        if report.broken:
            text = "does not follow the target's distribution"
        elif not report.distribution.tested:
            text, style = "too few tokens for a test", "bold yellow"
        else:
            text = f"consistent with the target's distribution on {prompts}"
    elif report.equal:
        text = f"equal on all {prompts}" + (_ROUNDING if report.rounding else "")
    else:
        text = f"different on {total.prompts - total.equal} of {prompts}"
        if report.rounding and not report.broken:
            text, style = text + _ROUNDING, "bold yellow"
        elif report.baseline_differs:
            text += f"; {report.baseline} differs from itself, so the fault lies below the method"
        elif report.broken:
            text += f"; it is declared {report.exactness.value}, so this is a fault"
        else:
            text += f"; it is declared {report.exactness.value} and may differ"
            style = "bold yellow"
    console.print(f"{report.method}: {text}", style=style, markup=False, soft_wrap=True)
