"""`outstride bench …`: measurements, as tables for people and one JSON object at the end."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from outstride.cli import load, parallel, sampling, screen
from outstride.cli.context import Context, add_model_options, check_method

if TYPE_CHECKING:
    from outstride.bench.acceptance import AcceptanceReport
    from outstride.bench.decode import DecodeReport
    from outstride.bench.fidelity import FidelityReport
    from outstride.bench.peers import PeerReport
    from outstride.bench.result import BenchResult
    from outstride.bench.step import StepReport


def _numbers(text: str) -> list[int]:
    """`1,2,4` as numbers, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write whole numbers with commas between them, not {text!r}"
        ) from None


def add(commands: Any) -> None:
    """Adds the command and its own commands."""
    parser = commands.add_parser(
        "bench", help="measure", description="Measurements.", allow_abbrev=False
    )
    parser.set_defaults(action=lambda _args, _context: _choose(parser))
    kinds = parser.add_subparsers(metavar="WHAT", dest="what")
    load.add(kinds, output)
    step = kinds.add_parser(
        "step",
        help="what one pass of the model costs",
        description="Times one pass of the model against the number of nodes, against cached "
        "length, and for several sequences at once. The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(step)
    step.add_argument(
        "--nodes",
        type=_numbers,
        default=[1, 2, 4, 8, 16, 32, 64],
        metavar="N,N,…",
        help="numbers of nodes in a pass (default 1,2,4,8,16,32,64)",
    )
    step.add_argument(
        "--cached", type=int, default=128, metavar="N", help="entries before them (default 128)"
    )
    step.add_argument(
        "--lengths",
        type=_numbers,
        default=[0, 128, 512, 1024, 2048],
        metavar="N,N,…",
        help="cached lengths before one node (default 0,128,512,1024,2048)",
    )
    step.add_argument(
        "--sequences",
        type=_numbers,
        default=[1, 4, 16],
        metavar="N,N,…",
        help="numbers of sequences with one node each (default 1,4,16)",
    )
    step.add_argument(
        "--repeat", type=int, default=7, metavar="N", help="runs of each, in turns (default 7)"
    )
    step.add_argument(
        "--against",
        choices=("llama.cpp",),
        help="compare with llama.cpp on the same GGUF file instead: passes, generation, start, "
        "memory and host work, beside what each must be",
    )
    step.add_argument(
        "--device",
        choices=("auto", "cuda"),
        default="auto",
        help="cuda: measure an NVIDIA card beside transformers and beside what each figure must be",
    )
    output(step)
    step.set_defaults(action=run_step)
    decode = kinds.add_parser(
        "decode",
        help="methods beside each other on the same prompts",
        description="Answers prompts with several methods in turns: tokens per pass, tokens per "
        "second, speed against plain, and where the time goes. The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(decode)
    decode.add_argument(
        "--methods",
        default="auto",
        metavar="NAMES",
        help="methods besides plain, with spaces between them: 'auto ngram:length=4' (default auto)",
    )
    decode.add_argument(
        "--prompts", metavar="FILE", help="as for prove (default: a dozen built-in prompts)"
    )
    decode.add_argument(
        "--limit", type=int, metavar="N", help="only N prompts, spread evenly over the file"
    )
    decode.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="N more prompts that nothing can be guessed about (default 0)",
    )
    decode.add_argument(
        "--batch", type=int, default=1, metavar="N", help="prompts at a time (default 1)"
    )
    decode.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="how often to run it all (default 1)"
    )
    decode.add_argument(
        "--warm",
        action="store_true",
        help="one more round in which drafters remember the first one",
    )
    decode.add_argument("--raw", action="store_true", help="prompts as they are; no chat template")
    output(decode)
    sampling.add(decode, without=("logprobs",), max_tokens=160)
    decode.set_defaults(action=run_decode)
    fidelity = kinds.add_parser(
        "fidelity",
        help="how close a weights format stays to fp32",
        description="Reads texts with the fp32 reference and with another format, and compares the "
        "distributions behind every token. The last line is one JSON object.",
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
        help="read at most N texts, evenly over the file (default 12)",
    )
    output(fidelity)
    fidelity.set_defaults(action=run_fidelity)
    acceptance = kinds.add_parser(
        "acceptance",
        help="how often rules accept, and how often the best possible one would",
        description="Compares acceptance rules with the optimum on synthetic pairs of distributions. "
        "No model is loaded. The last line is one JSON object.",
        allow_abbrev=False,
    )
    acceptance.add_argument(
        "--candidates",
        type=_numbers,
        default=[1, 2, 4, 8],
        metavar="N,N,…",
        help="numbers of candidates (default 1,2,4,8)",
    )
    acceptance.add_argument(
        "--vocabulary", type=int, default=256, metavar="N", help="tokens (default 256)"
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
    parallel.add(kinds)


def _choose(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def output(parser: argparse.ArgumentParser) -> None:
    """Options of everything that has a result."""
    parser.add_argument(
        "--json", action="store_true", help="print the JSON object and nothing else"
    )
    parser.add_argument("--out", metavar="FILE", help="write the result to a file, too")


def deliver(result: BenchResult, args: argparse.Namespace) -> None:
    """Writes a result where it was asked for."""
    if args.out is not None:
        from outstride.bench import result as results

        results.write(result, args.out)
        screen.note(f"written to {args.out}")


def close(result: BenchResult, args: argparse.Namespace) -> int:
    """Every bench ends alike: the result where it was asked for, and as the last line."""
    deliver(result, args)
    print(result.to_json(), flush=True)
    return 0


def run_step(args: argparse.Namespace, context: Context) -> int:
    """Measures passes."""
    if args.against is not None:
        return run_against(args, context)
    if args.device == "cuda":
        return run_card(args)
    from outstride.bench import step
    from outstride.bench.result import BenchResult

    wanted = step.cases(args.nodes, args.cached, args.lengths, args.sequences)
    with context.load(args.model, args.weights) as llm:
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
        result = BenchResult("step", settings)
        with screen.bar("passes") as progress:
            report = step.measure(
                llm.engine.passes, wanted, repeat=args.repeat, warmups=1, progress=progress
            )
        result.finish(report.samples(), report.summary())
    if not args.json:
        _print_step(report, result)
    return close(result, args)


def _print_step(report: StepReport, result: BenchResult) -> None:
    from rich.table import Table

    console = screen.console()
    machine, settings = result.machine, result.settings
    console.print(
        f"[bold]One pass of {settings['model']}[/bold]: median of {settings['repeat']}, in "
        f"milliseconds, on {machine['accelerator'] or machine['cpu']}, {machine['cores']} cores"
    )
    headings = {
        "nodes": f"A chain of nodes behind {settings['cached']} cached entries",
        "cached": "One node behind cached entries",
        "sequences": f"One node each for several sequences behind {settings['cached']} entries",
    }
    for sweep, heading in headings.items():
        rows = [(case, series) for case, series in report.series.items() if case.sweep == sweep]
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
    if any(s.spread > s.median / 3 for s in report.series.values()):
        console.print("durations vary by a third or more: is the machine busy?", style="yellow")
    console.print()


# --- beside llama.cpp -----------------------------------------------------------------------------


def run_against(args: argparse.Namespace, context: Context) -> int:
    """Measures passes and generation beside llama.cpp."""
    from outstride.bench import host, peers
    from outstride.bench.result import BenchResult

    path = peers.gguf_of(args.model)
    peers.library()  # what is missing is said before a model is loaded
    settings = {
        "model": args.model,
        "weights": args.weights,
        "against": args.against,
        "file": path.name,
        "threads": peers.cores(),
        "repeat": args.repeat,
        "load average": peers.load_average(),
    }
    result = BenchResult("peers", settings)
    command = [sys.executable, "-m", "outstride.cli", "run", "Why is the sky blue?"]
    command += ["--model", args.model, "--weights", args.weights, "--max-tokens", "1"]
    started = peers.start(command)  # before this process has a model of its own
    with context.load(args.model, args.weights) as llm:
        settings |= {"fingerprint": llm.fingerprint}
        with screen.bar("both sides in turns") as progress:
            report = peers.compare(llm, path, repeat=args.repeat, progress=progress)
        report.rows += [*started, *host.host(llm)]
    settings["load average at the end"] = peers.load_average()
    result.finish(report.samples(), report.summary())
    if not args.json:
        _print_peers(report, result)
    return close(result, args)


def run_card(args: argparse.Namespace) -> int:
    """Measures an NVIDIA card."""
    from outstride.bench import card, peers
    from outstride.bench.result import BenchResult

    settings = {
        "model": args.model,
        "against": "transformers",
        "threads": peers.cores(),
        "load average": peers.load_average(),
    }
    result = BenchResult("card", settings)
    with screen.bar("parts") as progress:
        report = card.compare(args.model, progress=progress)
    settings["load average at the end"] = peers.load_average()
    result.finish(report.samples(), report.summary())
    if not args.json:
        _print_peers(report, result)
    return close(result, args)


def _print_peers(report: PeerReport, result: BenchResult) -> None:
    from rich.table import Table

    console = screen.console()
    machine, settings = result.machine, result.settings
    console.print(
        f"[bold]{settings['model']} beside {settings['against']} {report.peer['version']}[/bold]: "
        f"medians of runs in turns, {settings['threads']} threads each, on {machine['cpu']}; load "
        f"average {settings['load average'][:1]} before, "
        f"{settings['load average at the end'][:1]} after"
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


# --- methods --------------------------------------------------------------------------------------


def run_decode(args: argparse.Namespace, context: Context) -> int:
    """Compares methods."""
    from dataclasses import asdict

    from outstride.bench import prompts
    from outstride.bench.decode import decode, incompressible
    from outstride.bench.result import BenchResult
    from outstride.errors import InvalidParams

    params = sampling.params_of(args)
    if min(args.batch, args.rounds, 1 if args.limit is None else args.limit) < 1:
        raise InvalidParams("--limit, --batch and --rounds must be at least 1")
    if args.random < 0:
        raise InvalidParams("--random must be at least 0")
    methods = args.methods.split()
    for spec in methods:
        check_method(spec)
    listed = prompts.read_prompts(args.prompts) if args.prompts else prompts.built_in()
    listed = prompts.spread(listed, args.limit)
    settings = {
        "model": args.model,
        "methods": methods,
        "prompts": args.prompts or "built-in",
        "limit": args.limit,
        "random": args.random,
        "batch": args.batch,
        "rounds": args.rounds,
        "warm": args.warm,
        "raw": args.raw,
        "params": asdict(params),
    }
    result = BenchResult("decode", settings)
    with context.load(args.model, args.weights) as llm:
        settings["fingerprint"] = llm.fingerprint
        with screen.bar("answers") as progress:
            report = decode(
                llm,
                methods,
                [*listed, *incompressible(llm, args.random)],
                params,
                batch=args.batch,
                rounds=args.rounds,
                warm=args.warm,
                raw=args.raw,
                progress=progress,
            )
        if llm.engine.scheduler.cost is not None:
            settings["cost"] = {n: round(s, 6) for n, s in llm.engine.scheduler.cost.knots.items()}
    result.finish(report.samples(), report.summary())
    if not args.json:
        _print_decode(report, result)
    return close(result, args)


def _print_decode(report: DecodeReport, result: BenchResult) -> None:
    from rich.table import Table

    console = screen.console()
    machine, settings = result.machine, result.settings
    console.print(
        f"[bold]{settings['model']}[/bold], {settings['batch']} at a time, "
        f"{settings['params']['max_tokens']} tokens, temperature "
        f"{settings['params']['temperature']}, on {machine['accelerator'] or machine['cpu']}"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    table.add_column("task")
    for name in ("equal", "tokens/pass", "nodes/pass", "tok/s", "x plain", "at least"):
        table.add_column(name, justify="right")
    for name in ("draft", "forward", "accept", "commit"):
        table.add_column(name, justify="right", style="dim")
    before = ""
    for line in report.lines():
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
    console.print(table)
    console.print(
        "x plain: time of plain against time of the method on the same prompts, mean over tasks; "
        "at least: lower end of its 95% interval; commit includes planning",
        style="dim",
    )
    console.print()


# --- fidelity -------------------------------------------------------------------------------------


def run_fidelity(args: argparse.Namespace, context: Context) -> int:
    """Compares a weights format with fp32."""
    import gc

    from outstride.bench import fidelity
    from outstride.bench.result import BenchResult

    texts = fidelity.texts_of(args.texts, args.limit)
    settings = {
        "model": args.model,
        "weights": args.weights,
        "texts": args.texts or "built-in",
        "limit": args.limit,
    }
    result = BenchResult("fidelity", settings)
    with screen.bar("texts") as progress:
        with context.load(args.model, "fp32") as reference:
            pairs = [(text.id, reference.encode(text.text)) for text in texts]
            held = fidelity.Fidelity(pairs)
            held.record(reference.engine.passes, progress)
        del reference
        gc.collect()  # one model at a time
        with held, context.load(args.model, args.weights) as llm:
            settings["fingerprint"] = llm.fingerprint
            report = held.compare(llm.engine.passes, progress)
    result.finish(report.samples(), report.summary())
    if not args.json:
        _print_fidelity(report, settings)
    return close(result, args)


def _print_fidelity(report: FidelityReport, settings: dict[str, Any]) -> None:
    from outstride.bench.fidelity import MOST_KL, MOST_LOSS

    difference = report.loss - report.reference_loss
    screen.console().print(
        f"[bold]{settings['model']}, weights {settings['weights']}, beside fp32[/bold]: "
        f"{report.tokens} tokens of {len(report.cases)} texts\n"
        f"mean KL         {report.kl:.5f} (must be <= {MOST_KL:g})\n"
        f"same top token  {report.same:.2%}\n"
        f"loss            {report.loss:.4f}, fp32 {report.reference_loss:.4f}, difference "
        f"{difference:+.4f} (must be within {MOST_LOSS:g})\n"
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
    screen.console().print("[bold]How often one of the candidates is taken[/bold]", table, sep="\n")
