"""`outstride serve`: OpenAI's API, with a choice of method per request."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from outstride.cli.context import Context, add_adapter_option, add_model_options, check_method
from outstride.errors import InvalidParams

KEY = "OUTSTRIDE_API_KEY"


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve",
        help="serve the OpenAI API",
        description="Serves OpenAI's API on loopback. Ctrl-C or SIGTERM finishes what runs and ends.",
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
        help="what requests call the model (default: as given by --model); may be repeated",
    )
    add_engine_options(parser)
    safety = parser.add_argument_group("limits and access")
    safety.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"a key that requests must carry; may be repeated, also {KEY} in the environment",
    )
    safety.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="a file with a key on each line"
    )
    safety.add_argument(
        "--origin",
        action="append",
        metavar="URL",
        help="a web origin whose pages may call this server (default none); may be repeated",
    )
    safety.add_argument(
        "--queue",
        type=int,
        default=256,
        metavar="N",
        help="answers that may wait beyond those that run; more get status 429 (default 256)",
    )
    safety.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="the longest that a request may take (default 600)",
    )
    safety.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for running requests when told to stop (default 30)",
    )
    safety.add_argument(
        "--no-log", action="store_true", help="no line per request on standard error"
    )
    parser.set_defaults(action=run)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What shapes the engine, for every command that starts one in a process of its own."""
    parser.add_argument(
        "--method",
        default="auto",
        help="for requests that name none (default auto; see `outstride methods`)",
    )
    parser.add_argument(
        "--draft-model",
        action="append",
        metavar="MODEL",
        help="a model that requests may name as drafter; may be repeated",
    )
    parser.add_argument(
        "--pages", type=int, metavar="N", help="pages of the cache (default: by memory)"
    )
    parser.add_argument(
        "--max-sequences",
        type=int,
        default=64,
        metavar="N",
        help="answers that run at the same time (default 64)",
    )
    parser.add_argument(
        "--max-nodes", type=int, default=256, metavar="N", help="nodes of a pass (default 256)"
    )


def settings_of(args: argparse.Namespace, **more: Any) -> Any:
    """Settings of the server, from options that it shares with `batch`."""
    from outstride.serve.settings import ServeSettings
    from outstride.serve.wire import EngineSettings

    check_method(args.method)
    for name in ("max_sequences", "max_nodes", "pages"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InvalidParams(f"--{name.replace('_', '-')} must be at least 1")
    engine = EngineSettings(
        model=args.model,
        weights=args.weights,
        adapter=args.adapter,
        pages=args.pages,
        max_nodes=args.max_nodes,
        max_sequences=args.max_sequences,
        draft_models=tuple(args.draft_model or ()),
    )
    return ServeSettings(engine=engine, method=args.method, **more)


def run(args: argparse.Namespace, context: Context) -> int:
    """Serves."""
    del context  # the engine has a process of its own, which loads the model itself
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
        api_keys=_keys(args),
        origins=tuple(args.origin or ()),
        grace=args.grace,
        log=not args.no_log,
    )
    for name in (args.model, *settings.engine.draft_models):
        locate(name)
    print(f"http://{args.host}:{args.port} (loading {args.model})", file=sys.stderr, flush=True)
    return serve(settings, args.host, args.port)


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        keys += args.api_key_file.read_text(encoding="utf-8").split()
    if KEY in os.environ:
        keys += os.environ[KEY].split()
    if any(not key for key in keys) or (args.api_key_file is not None and not keys):
        raise InvalidParams("an API key is empty")
    return tuple(dict.fromkeys(keys))
