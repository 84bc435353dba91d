"""`outstride batch`: runs a file of requests offline, without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from outstride.cli.context import Context, add_adapter_option, add_model_options
from outstride.cli.serve import add_engine_options, settings_of


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "batch",
        help="run a file of requests offline",
        description="Answers the requests of an OpenAI batch file. An interrupted run continues "
        "where it stopped when it is started again with the same files.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "input", type=Path, metavar="IN.jsonl", help="requests, one JSON object per line"
    )
    parser.add_argument(
        "output", type=Path, metavar="OUT.jsonl", help="file that the answers are written to"
    )
    add_model_options(parser)
    add_adapter_option(parser)
    add_engine_options(parser)
    parser.set_defaults(action=run)


class _Progress:
    """A progress line on standard error: redrawn on a terminal, every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._started = self._shown = time.monotonic()

    def __call__(self, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        if done < total and now - self._shown < (0.2 if self._terminal else 10.0):
            return
        self._shown = now
        rate = tokens / max(now - self._started, 1e-9)
        end = "\r" if self._terminal and done < total else "\n"
        text = f"{done} of {total} answered, {tokens} tokens, {rate:.0f} tok/s"
        print(text, end=end, file=sys.stderr, flush=True)


def run(args: argparse.Namespace, context: Context) -> int:
    """Runs the file; 1 if requests failed."""
    del context  # the engine process loads the model itself
    from outstride.models.load import locate
    from outstride.serve import batch

    lines = batch.read(args.input)
    names = {str(line.body["model"]) for line in lines if line.body.get("model")}
    settings = settings_of(args, names=(args.model, *sorted(names)), log=False)
    locate(args.model)
    failed = asyncio.run(batch.run(settings, lines, args.output, _Progress()))
    if failed:
        print(f"{failed} requests failed; their lines in the output say why", file=sys.stderr)
    return 1 if failed else 0
