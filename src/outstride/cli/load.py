"""`outstride bench serve`: running servers under load."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import Context
from outstride.cli.outcome import conduct, decimals, output
from outstride.cli.renamed_options import add_renamed
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from outstride.bench.harness import ProgressCounter
    from outstride.bench.server_load import ServeReport


def add(kinds: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = kinds.add_parser(
        "serve",
        help="a server under load",
        description="Puts a running server under load: total tokens per second of streaming clients, "
        "compared with another OpenAI-compatible server if one is named; then, if requested, goodput "
        "and latency by arrival rate, inter-token latency during the prefill of a long prompt, and a "
        "soak test. The last line is one JSON object.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)"
    )
    parser.add_argument("--against", metavar="URL", help="another server, measured in turns")
    parser.add_argument("--model", default="smollm2", help="model name of the requests")
    parser.add_argument("--api-key", default="none", metavar="KEY", help="API key of both servers")
    parser.add_argument("--prompts", metavar="FILE", help=".txt or .jsonl (default: built-in ones)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only N prompts")
    parser.add_argument(
        "--clients", type=int, default=16, metavar="N", help="streaming clients (default 16)"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="tokens of each answer (default 128)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="rounds, also of --itl (default 1)"
    )
    parser.add_argument("--method", default="auto", help="method of the requests (default auto)")
    _add_stress(parser)
    _add_arrivals(parser)
    output(parser)
    parser.set_defaults(action=run)


def _add_stress(parser: argparse.ArgumentParser) -> None:
    """Adds inter-token latency, soak and kill."""
    parser.add_argument(
        "--itl",
        nargs="?",
        const="plain",
        metavar="METHOD",
        help="inter-token latency: 8 requests decode and a prompt of 3,000 words arrives (METHOD of "
        "all requests: default plain)",
    )
    add_renamed(parser, "--gaps", "--itl")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the inter-token latencies as SVG"
    )
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="64 clients send mixed requests for this long"
    )
    parser.add_argument(
        "--kill",
        type=int,
        metavar="PID",
        help="last, kill the engine of the server with this process id while 16 clients wait",
    )


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    """Adds the open-loop load and the limits of a good request."""
    parser.add_argument(
        "--rate",
        type=decimals,
        default=[],
        metavar="X,X,…",
        help="arrival rates of an open-loop load, in requests per second (Poisson), one after the "
        "other",
    )
    parser.add_argument(
        "--requests", type=int, default=40, metavar="N", help="requests at each rate (default 40)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the arrivals (default 0)"
    )
    parser.add_argument(
        "--ttft-limit",
        type=float,
        default=2000.0,
        metavar="MS",
        help="largest time to first token of a good request, in milliseconds (default 2000)",
    )
    add_renamed(parser, "--first-limit", "--ttft-limit")
    parser.add_argument(
        "--itl-limit",
        type=float,
        default=200.0,
        metavar="MS",
        help="largest inter-token latency of a good request, in milliseconds (default 200)",
    )
    add_renamed(parser, "--gap-limit", "--itl-limit")


def run(args: argparse.Namespace, context: Context) -> int:
    """Runs the load."""
    del context  # the server has the model
    from outstride.bench.arrivals import ArrivalReport, LatencyLimits
    from outstride.bench.harness import ProgressCounter
    from outstride.bench.result import BenchResult
    from outstride.bench.server_load import ServeReport

    if min(args.clients, args.tokens, args.rounds, args.requests) < 1 or (args.soak or 1) <= 0:
        raise InvalidParams("--clients, --tokens, --rounds, --requests, --soak must be positive")
    if min([*args.rate, args.ttft_limit, args.itl_limit]) <= 0:
        raise InvalidParams("--rate, --ttft-limit and --itl-limit must be positive")
    names = ["url", "against", "model", "clients", "tokens", "rounds", "method", "soak"]
    names += ["rate", "requests", "seed", "ttft_limit", "itl_limit", "prompts", "limit"]
    result = BenchResult("serve", {name: getattr(args, name) for name in names})
    arrivals = ArrivalReport(LatencyLimits(args.ttft_limit / 1e3, args.itl_limit / 1e3))
    report = ServeReport(args.url, args.against, arrivals)
    code = conduct(
        args,
        result,
        report,
        lambda progress: asyncio.run(_measure(args, report, ProgressCounter(progress))),
        lambda: _print(report),
        message="parts",
    )
    return code or int(report.went_wrong)


async def _measure(args: argparse.Namespace, report: ServeReport, watch: ProgressCounter) -> None:
    """Runs everything that was requested."""
    from outstride.bench.arrivals import arrive
    from outstride.bench.serve import Client, load

    client = Client(args.url, args.api_key)
    method = {"outstride": {"method": args.method}}
    servers = [(args.url, client, method)]
    if args.against:
        servers.append((args.against, Client(args.against, args.api_key), {}))
    prompts = _prompts(args)
    turns = len(servers) + bool(args.itl or args.plot)
    extras = bool(args.soak) + (args.kill is not None)
    watch.expected = args.rounds * turns + len(args.rate) * args.requests + extras
    started = time.time()  # the prefix cache of an earlier run must not help this one
    for number in range(args.rounds):
        for url, one, body in servers:
            salt = {"cache_salt": f"{started} {number}"} if body else {}
            found = await load(
                one, args.model, prompts, clients=args.clients, tokens=args.tokens, **body, **salt
            )
            if found.tokens == 0:
                raise OutstrideError(
                    f"{url} answered nothing; is it ready, and does it serve this model?"
                )
            report.enter(url, number, found)
            _say(args, f"{url}: {found.rate:.0f} tok/s, {found.failed} of {found.requests} failed")
            watch.advance()
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
            done=watch.advance,
            cache_salt=f"{started} at {rate}",
            **method,
        )
    if args.itl or args.plot:
        report.itl = await _itl(args, client, watch)
    if args.soak:
        report.soak = await _soak(args, client)
        watch.advance()
    if args.kill is not None:
        report.kill = await _kill(args, client)
        watch.advance()


def _print(report: ServeReport) -> None:
    from rich.table import Table

    console = screen.console()
    for url, rate in report.rates.items():
        console.print(f"{url}: {rate:.0f} tokens per second", markup=False)
    if rates := report.arrivals.rates():
        table = Table(box=None, pad_edge=False)
        names = ("requests/s", "sent", "failed", "good", "goodput/s", "tok/s", "TTFT p50", "p99")
        for name in (*names, "ITL p50", "p99"):
            table.add_column(name, justify="right")
        for row in rates:
            times = (row["ttft_p50"], row["ttft_p99"], row["itl_p50"], row["itl_p99"])
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
            f"good: TTFT within {limits.ttft * 1e3:g} ms, no ITL above {limits.itl * 1e3:g} ms",
            style="dim",
        )
    console.print()


def _prompts(args: argparse.Namespace) -> list[str]:
    from outstride.bench.prompts import built_in, read_prompts, spread

    found = read_prompts(args.prompts) if args.prompts else built_in()
    return [prompt.text for prompt in spread(found, args.limit)]


async def _itl(args: argparse.Namespace, client: Any, watch: ProgressCounter) -> dict[str, Any]:
    """The median round by its largest ratio, and the largest ratios of all rounds."""
    from outstride.bench.inter_token_latency import measure, plot

    rounds = []
    for _ in range(args.rounds):
        rounds.append(await measure(client, args.model, method=args.itl or "plain"))
        median, largest = 1e3 * rounds[-1].median, 1e3 * rounds[-1].max
        _say(args, f"ITL: median {median:.1f} ms, largest with a long prompt {largest:.1f} ms")
        watch.advance()
    middle = sorted(rounds, key=lambda found: found.max_ratio)[(len(rounds) - 1) // 2]
    if args.plot:
        args.plot.write_text(plot(middle), encoding="utf-8")
    return {**middle.to_dict(), "ratios": [round(found.max_ratio, 2) for found in rounds]}


async def _soak(args: argparse.Namespace, client: Any) -> dict[str, Any]:
    from outstride.bench.decode import exact_methods
    from outstride.bench.soak import soak

    found = await soak(client, args.model, methods=exact_methods(), seconds=args.soak)
    _say(args, f"soak: {found.asked} requests, {len(found.wrong)} failures")
    return found.to_dict()


async def _kill(args: argparse.Namespace, client: Any) -> dict[str, Any]:
    from outstride.bench.kill import kill

    found = await kill(client, args.model, args.kill)
    _say(
        args,
        f"kill: ready again after {found['ready_again_s']} s, {found['silent']} without a response",
    )
    return found


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        screen.note(text)
