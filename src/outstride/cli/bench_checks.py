"""`outstride bench fidelity` and `outstride bench acceptance`: weights formats and acceptance rules."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import Context, add_model_options
from outstride.cli.outcome import close, numbers, output

if TYPE_CHECKING:
    from outstride.bench.acceptance import AcceptanceReport
    from outstride.bench.fidelity import FidelityReport


def add(kinds: Any) -> None:
    """Adds the commands."""
    fidelity = kinds.add_parser(
        "fidelity",
        help="how close a weights format stays to fp32",
        description="Scores texts with the fp32 reference and with another weights format, and "
        "compares the distributions at every token. The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(fidelity)
    fidelity.add_argument(
        "--texts",
        metavar="FILE",
        help=".jsonl with question and answer, or any prompt file (default: built-in prompts)",
    )
    fidelity.add_argument(
        "--limit",
        type=int,
        default=12,
        metavar="N",
        help="score at most N texts, evenly spaced over the file (default 12)",
    )
    output(fidelity)
    fidelity.set_defaults(action=run_fidelity)
    acceptance = kinds.add_parser(
        "acceptance",
        help="acceptance rates of rules, and the largest possible rate",
        description="Compares acceptance rules with the optimum on synthetic pairs of distributions. "
        "No model is loaded. The last line is one JSON object.",
        allow_abbrev=False,
    )
    acceptance.add_argument(
        "--candidates",
        type=numbers,
        default=[1, 2, 4, 8],
        metavar="N,N,…",
        help="numbers of draft candidates (default 1,2,4,8)",
    )
    acceptance.add_argument(
        "--vocabulary",
        type=int,
        default=256,
        metavar="N",
        help="tokens of the vocabulary (default 256)",
    )
    acceptance.add_argument(
        "--pairs",
        type=int,
        default=8,
        metavar="N",
        help="pairs of distributions for each quality of draft (default 8)",
    )
    output(acceptance)
    acceptance.set_defaults(action=run_acceptance)


def run_fidelity(args: argparse.Namespace, context: Context) -> int:
    """Compares a weights format with fp32."""
    import gc

    from outstride.bench import fidelity
    from outstride.bench.result import BenchResult

    texts = fidelity.texts_of(args.texts, args.limit)
    settings = {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "texts": args.texts or "built-in",
        "limit": args.limit,
    }
    result = BenchResult("fidelity", settings)
    with screen.bar("texts") as progress:
        with context.load(args.model, "cpu", "fp32") as reference:
            pairs = [(text.id, reference.encode(text.text)) for text in texts]
            held = fidelity.Fidelity(pairs)
            held.record(reference.engine.idle_runner(), progress)
        del reference
        gc.collect()  # one model at a time
        with held, context.load(args.model, args.device, args.weights) as llm:
            settings["fingerprint"] = llm.fingerprint
            report = held.compare(llm.engine.idle_runner(), progress)
    result.finish(report.samples(), report.summary())
    if not args.json:
        _print_fidelity(report, settings)
    return close(result, args)


def _print_fidelity(report: FidelityReport, settings: dict[str, Any]) -> None:
    from outstride.bench.fidelity import MAX_KL, MAX_LOSS_DIFFERENCE

    difference = report.loss - report.reference_loss
    screen.console().print(
        f"[bold]{settings['model']}, weights {settings['weights']}, against fp32[/bold]: "
        f"{report.tokens} tokens of {len(report.cases)} texts\n"
        f"mean KL         {report.kl:.5f} (must be <= {MAX_KL:g})\n"
        f"same top token  {report.same:.2%}\n"
        f"loss            {report.loss:.4f}, fp32 {report.reference_loss:.4f}, difference "
        f"{difference:+.4f} (must be within {MAX_LOSS_DIFFERENCE:g})\n"
        f"{'met' if report.met else 'not met'}\n"
    )


# --- acceptance -----------------------------------------------------------------------------------


def run_acceptance(args: argparse.Namespace, _: Context) -> int:
    """Compares acceptance rules with the optimum."""
    from outstride.bench import acceptance
    from outstride.bench.result import BenchResult

    noises = (0.3, 0.7, 1.2, 2.0)
    settings = {
        "noises": noises,
        "candidates": args.candidates,
        "vocabulary": args.vocabulary,
        "pairs": args.pairs,
    }
    result = BenchResult("acceptance", settings)
    with screen.bar("pairs") as progress:
        report = acceptance.measure(
            noises, args.candidates, size=args.vocabulary, pairs=args.pairs, progress=progress
        )
    result.finish(report.samples(), report.summary())
    if not args.json:
        _print_acceptance(report)
    return close(result, args)


def _print_acceptance(report: AcceptanceReport) -> None:
    from rich.table import Table

    from outstride.bench.acceptance import RULES

    table = Table(box=None, pad_edge=False)
    for name in ("overlap", "candidates", *RULES):
        table.add_column(name, justify="right")
    for case in report.cases:
        rates = [f"{case.rates[name]:.3f}" for name in RULES]
        table.add_row(f"{case.overlap:.2f}", str(case.candidates), *rates)
    screen.console().print("[bold]Acceptance rate of the candidates[/bold]", table, sep="\n")
