"""`outstride bench serve`: servers that run already, under load."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import Context
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from outstride.bench.result import BenchResult

METHODS = "plain,auto,ngram,suffix,recycle,mix,lookahead"


def add(kinds: Any, output: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the command to those of `bench`."""
    parser = kinds.add_parser(
        "serve",
        help="a server under load",
        description="Puts a running server under load: total tokens per second of streaming clients, "
        "beside those of another OpenAI-like server if one is named; then, where asked for, gaps "
        "between tokens while a long prompt is read, and a soak. The last line is one JSON object.",
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
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="turns (default 1)")
    parser.add_argument("--method", default="auto", help="of the requests (default auto)")
    parser.add_argument(
        "--gaps", action="store_true", help="8 requests decode and a prompt of 3,000 words arrives"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="where the gaps are drawn, as SVG"
    )
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="64 clients do what clients do, for so long"
    )
    output(parser)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Measures."""
    del context  # the server has the model
    from outstride.bench.result import BenchResult, write

    if min(args.clients, args.tokens, args.rounds) < 1 or (args.soak or 1) <= 0:
        raise InvalidParams("--clients, --tokens, --rounds and --soak must be positive")
    names = ("url", "against", "model", "clients", "tokens", "rounds", "method", "soak")
    result = BenchResult("serve", {name: getattr(args, name) for name in names})
    failed = asyncio.run(_measure(args, result))
    if args.out:
        write(result, args.out)
    print(result.to_json(), flush=True)
    return 1 if failed else 0


async def _measure(args: argparse.Namespace, result: BenchResult) -> bool:
    """Everything that was asked for; whether something went wrong."""
    from outstride.bench.serve import Client, Load, load

    client = Client(args.url, args.api_key)
    servers = [(args.url, client, {"outstride": {"method": args.method}})]
    if args.against:
        servers.append((args.against, Client(args.against, args.api_key), {}))
    samples: list[dict[str, Any]] = []
    loads: dict[str, list[Load]] = {}
    prompts = _prompts(args)
    for number in range(args.rounds):
        for url, one, body in servers:
            salt = {"cache_salt": f"round {number}"} if body else {}
            found = await load(
                one, args.model, prompts, clients=args.clients, tokens=args.tokens, **body, **salt
            )
            if found.tokens == 0:
                raise OutstrideError(f"{url} answered nothing; is it ready, is the model its own?")
            loads.setdefault(url, []).append(found)
            samples.append({"server": url, "round": number, **found.to_dict()})
            _say(args, f"{url}: {found.rate:.0f} tok/s, {found.failed} of {found.requests} failed")
    rates = {url: max(one.rate for one in found) for url, found in loads.items()}
    summary: dict[str, Any] = {
        "tokens_per_second": {url: round(rate, 1) for url, rate in rates.items()},
        "cpu_outside_steps": samples[0]["cpu_outside_steps"],
        "failed": sum(sample["failed"] for sample in samples),
    }
    if args.against:
        summary["ratio"] = round(rates[args.url] / rates[args.against], 2)
    if args.gaps or args.plot:
        summary["gaps"] = await _gaps(args, client)
    if args.soak:
        summary["soak"] = await _soak(args, client)
    result.finish(samples, summary)
    return bool(summary["failed"] or summary.get("soak", {}).get("wrong"))


def _prompts(args: argparse.Namespace) -> list[str]:
    from outstride.bench.prompts import built_in, read_prompts, spread

    found = read_prompts(args.prompts) if args.prompts else built_in()
    return [prompt.text for prompt in spread(found, args.limit)]


async def _gaps(args: argparse.Namespace, client: Any) -> dict[str, Any]:
    from outstride.bench.serve import gaps, plot

    found = await gaps(client, args.model)
    if args.plot:
        args.plot.write_text(plot(found), encoding="utf-8")
    said = found.to_dict()
    _say(args, f"gaps: {said['usual_gap_ms']} ms, with a long prompt {said['longest_gap_ms']} ms")
    return said


async def _soak(args: argparse.Namespace, client: Any) -> dict[str, Any]:
    from outstride.bench.soak import soak

    found = await soak(client, args.model, methods=METHODS.split(","), seconds=args.soak)
    _say(args, f"soak: {found.asked} requests, {len(found.wrong)} complaints")
    return found.to_dict()


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        screen.note(text)
