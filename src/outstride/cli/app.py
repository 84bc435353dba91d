"""The program: its commands, and the one place where errors become exit codes.

0    done
1    an error of the package, a file that cannot be read, or a failed `prove`
2    the command line is wrong, or `prove` had nothing to compare
130  interrupted by Ctrl-C
141  the reader of the output closed the pipe
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import outstride
from outstride.cli import (
    batch,
    bench,
    chat,
    fill,
    methods,
    models,
    prove,
    run,
    screen,
    serve,
    train,
    write_data,
)
from outstride.cli.context import Context, usual

COMMANDS = (run, chat, fill, serve, batch, methods, models, bench, prove, write_data, train)

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="outstride",
        description="Speculative decoding and parallel text generation: same model, same seed, "
        "same text, fewer forward passes.",
        epilog="Set OUTSTRIDE_DEBUG=1 to see the traceback of an error.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"outstride {outstride.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(commands)
    return top


def main(argv: Sequence[str] | None = None, *, context: Context | None = None) -> int:
    """Runs a command and returns its exit code."""
    top = parser()
    try:
        args = top.parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or shown the help
        return stop.code if isinstance(stop.code, int) else USAGE
    if args.command is None:
        top.print_help(sys.stderr)
        return USAGE
    try:
        code = int(args.action(args, context or usual()))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _detach_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if screen.debugging():
            raise
        screen.report_error(error)
        return FAILED


def _detach_stdout() -> None:
    """Redirects standard output to nowhere, since Python would fail again when it flushes at exit."""
    with suppress(OSError, ValueError):  # standard output may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
