"""`outstride batch`: files of requests, answered without a server."""

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
        help="answer a file of requests",
        description="Answers the requests of an OpenAI batch file. A run that broke off goes on where "
        "it was when it is started again with the same files.",
        allow_abbrev=False,
    )
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="requests, one on each line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="where the answers go")
    add_model_options(parser)
    add_adapter_option(parser)
    add_engine_options(parser)
    parser.set_defaults(action=run)


class _Progress:
    """A line on standard error, redrawn on a terminal and written now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._started = self._told = time.monotonic()

    def __call__(self, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        if done < total and now - self._told < (0.2 if self._terminal else 10.0):
            return
        self._told = now
        rate = tokens / max(now - self._started, 1e-9)
        end = "\r" if self._terminal and done < total else "\n"
        text = f"{done} of {total} answered, {tokens} tokens, {rate:.0f} tok/s"
        print(text, end=end, file=sys.stderr, flush=True)


def run(args: argparse.Namespace, context: Context) -> int:
    """Answers the file."""
    del context  # the engine has a process of its own, which loads the model itself
    from outstride.models.load import locate
    from outstride.serve import batch

    lines = batch.read(args.input)
    names = {str(line.body["model"]) for line in lines if line.body.get("model")}
    settings = settings_of(args, names=(args.model, *sorted(names)), log=False)
    locate(args.model)
    failed = asyncio.run(batch.run(settings, lines, args.output, _Progress()))
    if failed:
        print(f"{failed} requests failed; their answers say why", file=sys.stderr)
    return 1 if failed else 0
