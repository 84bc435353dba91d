"""`outstride bench serve`: servers that run already, under load."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import Context
from outstride.cli.outcome import conduct, decimals, output
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from outstride.bench.harness import Watch
    from outstride.bench.under_load import ServeReport


def add(kinds: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = kinds.add_parser(
        "serve",
        help="a server under load",
        description="Puts a running server under load: total tokens per second of streaming clients, "
        "beside those of another OpenAI-like server if one is named; then, where asked for, goodput "
        "and latency at rates of arrival, gaps between tokens while a long prompt is read, and a "
        "soak. The last line is one JSON object.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)"
    )
    parser.add_argument("--against", metavar="URL", help="another server, measured in turns")
    parser.add_argument("--model", default="smollm2", help="what requests call the model")
    parser.add_argument("--api-key", default="none", metavar="KEY", help="of both servers")
    parser.add_argument("--prompts", metavar="FILE", help=".txt or .jsonl (default: built-in ones)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only N prompts")
    parser.add_argument(
        "--clients", type=int, default=16, metavar="N", help="streaming clients (default 16)"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="of each answer (default 128)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="turns, of the gaps, too (default 1)"
    )
    parser.add_argument("--method", default="auto", help="of the requests (default auto)")
    parser.add_argument(
        "--gaps",
        nargs="?",
        const="plain",
        metavar="METHOD",
        help="8 requests decode and a prompt of 3,000 words arrives (METHOD of all: default plain)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="where the gaps are drawn, as SVG"
    )
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="64 clients do what clients do, for so long"
    )
    parser.add_argument(
        "--kill",
        type=int,
        metavar="PID",
        help="at last, kill the engine of the server with this process id under 16 clients",
    )
    parser.add_argument(
        "--rate",
        type=decimals,
        default=[],
        metavar="X,X,…",
        help="then requests per second that come by themselves (Poisson), each rate in turn",
    )
    parser.add_argument(
        "--requests", type=int, default=40, metavar="N", help="at each rate (default 40)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of their arrivals (default 0)"
    )
    parser.add_argument(
        "--first-limit",
        type=float,
        default=2000.0,
        metavar="MS",
        help="a good request has its first token within so many milliseconds (default 2000)",
    )
    parser.add_argument(
        "--gap-limit",
        type=float,
        default=200.0,
        metavar="MS",
        help="and no gap above so many between tokens (default 200)",
    )
    output(parser)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Measures."""
    del context  # the server has the model
    from outstride.bench.arrivals import ArrivalReport, Limits
    from outstride.bench.harness import Watch
    from outstride.bench.result import BenchResult
    from outstride.bench.under_load import ServeReport

    if min(args.clients, args.tokens, args.rounds, args.requests) < 1 or (args.soak or 1) <= 0:
        raise InvalidParams("--clients, --tokens, --rounds, --requests, --soak must be positive")
    if min([*args.rate, args.first_limit, args.gap_limit]) <= 0:
        raise InvalidParams("--rate, --first-limit and --gap-limit must be positive")
    names = ["url", "against", "model", "clients", "tokens", "rounds", "method", "soak"]
    names += ["rate", "requests", "seed", "first_limit", "gap_limit", "prompts", "limit"]
    result = BenchResult("serve", {name: getattr(args, name) for name in names})
    arrivals = ArrivalReport(Limits(args.first_limit / 1e3, args.gap_limit / 1e3))
    report = ServeReport(args.url, args.against, arrivals)
    code = conduct(
        args,
        result,
        report,
        lambda progress: asyncio.run(_measure(args, report, Watch(progress))),
        lambda: _print(report),
        message="parts",
    )
    return code or int(report.went_wrong)


async def _measure(args: argparse.Namespace, report: ServeReport, watch: Watch) -> None:
    """Everything that was asked for."""
    from outstride.bench.arrivals import arrive
    from outstride.bench.serve import Client, load

    client = Client(args.url, args.api_key)
    method = {"outstride": {"method": args.method}}
    servers = [(args.url, client, method)]
    if args.against:
        servers.append((args.against, Client(args.against, args.api_key), {}))
    prompts = _prompts(args)
    turns = len(servers) + bool(args.gaps or args.plot)
    extras = bool(args.soak) + (args.kill is not None)
    watch.expected = args.rounds * turns + len(args.rate) * args.requests + extras
    started = time.time()  # what was said in an earlier run must not help in this one
    for number in range(args.rounds):
        for url, one, body in servers:
            salt = {"cache_salt": f"{started} {number}"} if body else {}
            found = await load(
                one, args.model, prompts, clients=args.clients, tokens=args.tokens, **body, **salt
            )
            if found.tokens == 0:
                raise OutstrideError(f"{url} answered nothing; is it ready, is the model its own?")
            report.enter(url, number, found)
            _say(args, f"{url}: {found.rate:.0f} tok/s, {found.failed} of {found.requests} failed")
            watch.tick()
    for rate in args.rate:
        await arrive(
            client,
            args.model,
            prompts,
            report.arrivals,
            rate=rate,
            count=args.requests,
            tokens=args.tokens,
            seed=args.seed,
            done=watch.tick,
            cache_salt=f"{started} at {rate}",
            **method,
        )
    if args.gaps or args.plot:
        report.gaps = await _gaps(args, client, watch)
    if args.soak:
        report.soak = await _soak(args, client)
        watch.tick()
    if args.kill is not None:
        report.kill = await _kill(args, client)
        watch.tick()


def _print(report: ServeReport) -> None:
    from rich.table import Table

    console = screen.console()
    for url, rate in report.rates.items():
        console.print(f"{url}: {rate:.0f} tokens per second", markup=False)
    if rates := report.arrivals.rates():
        table = Table(box=None, pad_edge=False)
        names = ("requests/s", "sent", "failed", "good", "goodput/s", "tok/s", "first p50", "p99")
        for name in (*names, "gap p50", "p99"):
            table.add_column(name, justify="right")
        for row in rates:
            times = (row["first_p50"], row["first_p99"], row["gap_p50"], row["gap_p99"])
            table.add_row(
                f"{row['rate']:g}",
                str(row["requests"]),
                str(row["failed"]),
                str(row["good"]),
                f"{row['goodput']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                *("" if value is None else f"{value * 1e3:.0f} ms" for value in times),
            )
        limits = report.arrivals.limits
        console.print(table)
        console.print(
            f"good: first token within {limits.first * 1e3:g} ms, no gap above {limits.gap * 1e3:g} ms",
            style="dim",
        )
    console.print()


def _prompts(args: argparse.Namespace) -> list[str]:
    from outstride.bench.prompts import built_in, read_prompts, spread

    found = read_prompts(args.prompts) if args.prompts else built_in()
    return [prompt.text for prompt in spread(found, args.limit)]


async def _gaps(args: argparse.Namespace, client: Any, watch: Watch) -> dict[str, Any]:
    """Of several rounds the one in the middle, by its worst gap, and the worst of each."""
    from outstride.bench.gaps import gaps, plot

    rounds = []
    for _ in range(args.rounds):
        rounds.append(await gaps(client, args.model, method=args.gaps or "plain"))
        usual, longest = 1e3 * rounds[-1].usual, 1e3 * rounds[-1].longest
        _say(args, f"gaps: {usual:.1f} ms, with a long prompt {longest:.1f} ms")
        watch.tick()
    middle = sorted(rounds, key=lambda found: found.ratio)[(len(rounds) - 1) // 2]
    if args.plot:
        args.plot.write_text(plot(middle), encoding="utf-8")
    return {**middle.to_dict(), "ratios": [round(found.ratio, 2) for found in rounds]}


async def _soak(args: argparse.Namespace, client: Any) -> dict[str, Any]:
    from outstride.bench.decode import exact_methods
    from outstride.bench.soak import soak

    found = await soak(client, args.model, methods=exact_methods(), seconds=args.soak)
    _say(args, f"soak: {found.asked} requests, {len(found.wrong)} complaints")
    return found.to_dict()


async def _kill(args: argparse.Namespace, client: Any) -> dict[str, Any]:
    from outstride.bench.kill import kill

    found = await kill(client, args.model, args.kill)
    _say(
        args, f"kill: ready again after {found['ready_again_s']} s, {found['silent']} left waiting"
    )
    return found


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        screen.note(text)
