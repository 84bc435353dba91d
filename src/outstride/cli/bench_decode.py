"""`outstride bench decode`: compares methods on the same prompts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
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

    from outstride.bench.decode_report import DecodeLine, DecodeReport
    from outstride.bench.peers.llama_cpp import LlamaPeer
    from outstride.bench.prompts import BenchPrompt
    from outstride.bench.result import BenchResult
    from outstride.llm import LLM

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
    _add_against(decode)
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


def _add_against(parser: argparse.ArgumentParser) -> None:
    """Adds the comparison with another engine."""
    parser.add_argument(
        "--against",
        choices=("llama.cpp",),
        help="another engine answers every prompt too, from the same GGUF file, greedily, with one "
        "token per pass and as many tokens as plain; where OUTSTRIDE_ISA forces an instruction set, "
        "llama.cpp built for it (`make llama ISA=avx2`)",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="FOLDER",
        help="folder of the environments of llama.cpp's builds for one instruction set (default: "
        "those that `make llama` creates)",
    )


@contextmanager
def _peer(
    args: argparse.Namespace, llm: LLM, listed: Sequence[BenchPrompt], output: int
) -> Iterator[LlamaPeer | None]:
    """The engine of `--against`, or None."""
    if args.against is None:
        yield None
        return
    from outstride.bench.comparison_rows import cores
    from outstride.bench.peers.llama_cpp import open_all
    from outstride.bench.peers.llama_cpp_comparison import gguf_of
    from outstride.bench.peers.peer import PeerSetup

    longest = max(len(llm.encode(p.text, chat=not args.raw)) for p in listed)
    setup = PeerSetup(
        path=gguf_of(args.model),
        vocabulary=llm.model.vocab_size,
        threads=cores(),
        max_length=longest + output + 2,
        max_batch=max(args.batch),
        environments=args.environments,
    )
    [peer] = open_all(setup)
    with closing(peer):
        yield peer


def _check(args: argparse.Namespace) -> None:
    """Raises an error for options that cannot be."""
    from outstride.errors import InvalidParams

    if min([*args.batch, args.rounds, 1 if args.limit is None else args.limit], default=0) < 1:
        raise InvalidParams("--limit, --batch and --rounds must be at least 1")
    if args.random < 0 or min(args.temperature, default=-1.0) < 0:
        raise InvalidParams("--random and --temperature must be at least 0")
    if args.against is None:
        return
    if max(args.temperature) > 0 or args.random:
        raise InvalidParams(
            "--against compares greedy answers: leave out --temperature and --random"
        )
    from outstride.bench.peers import llama_cpp, llama_cpp_comparison

    llama_cpp_comparison.gguf_of(args.model)
    llama_cpp.library(args.environments)  # a missing build is reported before a model is loaded


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
    from outstride.bench.decode import decode, incompressible
    from outstride.bench.decode_report import DecodeReport
    from outstride.bench.peers.bounds import our_build
    from outstride.bench.result import BenchResult

    params = sampling.params_of(args)
    _check(args)
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
        "against": args.against,
    }
    result, report = BenchResult("decode", settings), DecodeReport()
    with loaded(args, context) as llm, _peer(args, llm, listed, params.max_tokens) as peer:
        settings |= {"fingerprint": llm.fingerprint_of(params.adapter), "ours": our_build(llm)}
        settings["peer"] = None if peer is None else peer.settings
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
                peer=peer,
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
    compared = any(line.against is not None for line in lines)
    for name in ("equal", "tokens/pass", "nodes/pass", "tok/s", "x plain", "at least"):
        table.add_column(name, justify="right")
    if compared:
        table.add_column("x llama.cpp", justify="right")
    verbs = () if compared else ("draft", "forward", "accept", "commit")
    for name in verbs:
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
            *([f"{line.against:.2f}"] if line.against is not None else []),
            *(f"{shares[verb]:.0%}" for verb in verbs),
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
    for row in report.extremes():
        console.print(
            f"{row['method']}{' (warm)' if row['warm'] else ''}, {row['batch']} at a time, "
            f"temperature {row['temperature']:g}: {row['mean']:.2f} x {row['over']}, lowest group "
            f"{row['min']:.2f} ({row['group']})",
            markup=False,
            soft_wrap=True,
        )
    if peer := settings.get("peer"):
        console.print(
            f"ours: {settings['ours'] or 'unknown'}; {settings['against']} {peer['version']}: "
            f"{peer['enabled'] or peer['build']}",
            style="dim",
            markup=False,
            soft_wrap=True,
        )
    console.print(
        "x plain: time of plain divided by time of the method on the same prompts, mean over tasks; "
        "at least: lower end of its 95% interval; commit includes planning",
        style="dim",
    )
    console.print()
