"""`outstride serve`: an HTTP server with OpenAI's API; each request may choose its method."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli.context import (
    Context,
    adapters_of,
    add_adapter_option,
    add_model_options,
    check_method,
)
from outstride.errors import InvalidParams

if TYPE_CHECKING:
    from outstride.serve.ipc import Handshake

KEY = "OUTSTRIDE_API_KEY"


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve",
        help="serve the OpenAI API over HTTP",
        description="Serves OpenAI's API on the loopback address, and a page to try it. A line on "
        "standard error says when it is ready. Ctrl-C or SIGTERM finishes the running requests "
        "and stops; a second one stops at once.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port (default 8000)")
    parser.add_argument(
        "--name",
        action="append",
        metavar="NAME",
        help="name of the model in requests (default: the value of --model); may be repeated",
    )
    add_engine_options(parser)
    _add_answer_options(parser)
    _add_access_options(parser)
    parser.set_defaults(action=run)


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Adds how tool calls and reasoning are found in answers."""
    from outstride.serve.parsing.answer import REASONING_PARSERS, TOOL_PARSERS

    parser.add_argument(
        "--tool-parser",
        default="auto",
        choices=TOOL_PARSERS,
        help="how the model writes tool calls (default auto: by its chat template)",
    )
    parser.add_argument(
        "--reasoning-parser",
        default="auto",
        choices=REASONING_PARSERS,
        help="how the model marks its reasoning, which answers then have as reasoning_content "
        "(default auto: by its chat template)",
    )


def _add_access_options(parser: argparse.ArgumentParser) -> None:
    """Adds API keys, origins, queue and time limits."""
    safety = parser.add_argument_group("limits and access")
    safety.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"API key that requests must have; may be repeated; also the variable {KEY}",
    )
    safety.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with one API key per line"
    )
    safety.add_argument(
        "--origin",
        action="append",
        metavar="URL",
        help="web origin whose pages may call this server, CORS (default none); may be repeated",
    )
    safety.add_argument(
        "--queue",
        type=int,
        default=256,
        metavar="N",
        help="answers that may wait for a running one to end; more get status 429 (default 256)",
    )
    safety.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit of a request (default 600)",
    )
    safety.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that running requests get when the server stops (default 30)",
    )
    safety.add_argument(
        "--no-log", action="store_true", help="do not log requests on standard error"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the engine options, for commands that run the engine in a separate process."""
    parser.add_argument(
        "--method",
        default="auto",
        help="decoding method of requests that name none (default auto; `outstride methods` lists "
        "them)",
    )
    parser.add_argument(
        "--draft-model",
        action="append",
        metavar="MODEL",
        help="draft model that requests may name; loaded at the start; may be repeated",
    )
    parser.add_argument(
        "--pages",
        type=int,
        metavar="N",
        help="size of the KV cache in pages of 16 tokens (default: by context length and free memory)",
    )
    parser.add_argument(
        "--max-sequences",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of answers that are decoded at the same time (default 64)",
    )
    parser.add_argument(
        "--max-nodes",
        type=int,
        default=256,
        metavar="N",
        help="maximum number of tokens in a forward pass, prefill and drafts included (default 256)",
    )


def settings_of(args: argparse.Namespace, **more: Any) -> Any:
    """The settings of `serve` and `batch`, from their common options."""
    from outstride.models.choose_weights import check_options
    from outstride.serve.ipc import EngineSettings
    from outstride.serve.settings import ServeSettings

    check_method(args.method)
    check_options(args.device, args.weights)
    for name in ("max_sequences", "max_nodes", "pages"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InvalidParams(f"--{name.replace('_', '-')} must be at least 1")
    diffusion, named = adapters_of(args)
    if clash := sorted({*named} & {args.model, *more.get("names", ())}):
        raise InvalidParams(f"--adapter {clash[0]}: this is the name of the model; choose another")
    engine = EngineSettings(
        model=args.model,
        device=args.device,
        weights=args.weights,
        adapter=diffusion,
        adapters=named,
        pages=args.pages,
        max_nodes=args.max_nodes,
        max_sequences=args.max_sequences,
        draft_models=tuple(args.draft_model or ()),
    )
    return ServeSettings(engine=engine, method=args.method, **more)


def run(args: argparse.Namespace, context: Context) -> int:
    """Serves until it is stopped."""
    del context  # the engine process loads the model itself
    from outstride.models.load import locate
    from outstride.serve.run import serve
    from outstride.serve.settings import Bounds

    if args.queue < 0 or not args.deadline > 0 or not args.grace >= 0:
        raise InvalidParams("--queue and --grace must not be negative, --deadline must be positive")
    if not 0 <= args.port <= 65535:
        raise InvalidParams(f"--port must be a number from 0 to 65535, not {args.port}")
    settings = settings_of(
        args,
        names=tuple(args.name or ()),
        bounds=Bounds(deadline=args.deadline),
        queue=args.queue,
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        api_keys=_keys(args),
        origins=tuple(args.origin or ()),
        grace=args.grace,
        log=not args.no_log,
    )
    for name in (args.model, *settings.engine.draft_models):
        locate(name)
    print(f"loading {args.model}", file=sys.stderr, flush=True)

    def announce(handshake: Handshake, address: str) -> None:
        print(ready_text(handshake, address, settings.method), file=sys.stderr, flush=True)

    return serve(settings, args.host, args.port, announce)


def ready_text(handshake: Handshake, address: str, method: str) -> str:
    """What the server says when it answers requests: where, which model, and with which resources."""
    return (
        f"ready: {address}\n"
        f"  model {handshake.model}, device {handshake.device}, weights {handshake.weights} "
        f"({handshake.operations})\n"
        f"  context length {handshake.context:,} tokens, KV cache {handshake.capacity:,} tokens "
        f"({handshake.kv_bytes / 1e6:,.0f} MB), default method {method}"
    )


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        keys += args.api_key_file.read_text(encoding="utf-8").split()
    if KEY in os.environ:
        keys += os.environ[KEY].split()
    if any(not key for key in keys) or (args.api_key_file is not None and not keys):
        raise InvalidParams("an API key is empty")
    return tuple(dict.fromkeys(keys))
