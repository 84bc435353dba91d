"""`outstride fill`: infilling, a text with holes that a masked model fills in."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from outstride.cli import sampling, screen
from outstride.cli.context import (
    Context,
    add_adapter_option,
    add_model_options,
    check_method,
    loaded,
)


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "fill",
        help="fill in the holes of a text (infilling)",
        description="Infilling with a masked (diffusion) model, or with a model and its diffusion "
        "adapter. A hole of eight tokens is written <mask:8>. The last line has the number of "
        "tokens and passes, and the speed.",
        allow_abbrev=False,
    )
    parser.add_argument("text", metavar="TEXT", help="the text; - reads it from standard input")
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--method",
        help="unmasking method, as NAME or NAME:key=value,… (default steps; `outstride methods` lists "
        "them)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    unused = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
    sampling.add(parser, without=unused)
    parser.set_defaults(action=run, parser=parser)


def run(args: argparse.Namespace, context: Context) -> int:
    """Fills in the holes and prints the text."""
    params = sampling.params_of(args)
    check_method(args.method)
    text = sys.stdin.read().rstrip("\n") if args.text == "-" else args.text
    with loaded(args, context) as llm:
        found = llm.fill(text, params, method=args.method or "steps")
        if args.json:
            samples = [
                {"text": f.text, "holes": f.holes, "completion": f.completion.to_dict()}
                for f in found
            ]
            values = {"model": llm.name, "fingerprint": llm.fingerprint, "outputs": samples}
            print(json.dumps(values, ensure_ascii=False))
            return 0
    for filled in found:
        print(screen.clean(filled.text))
    if params.temperature > 0 and params.seed is None:
        screen.note(f"--seed {found[0].completion.seed} gives this text again")
    print(screen.stats_line([filled.completion for filled in found]), flush=True)
    return 0
