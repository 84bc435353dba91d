"""`outstride write-data`: the model writes the words that its own trained parts learn from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride import registry
from outstride.cli.context import DEFAULT_MODEL, Context, add_weights_option
from outstride.errors import InvalidParams

if TYPE_CHECKING:
    from outstride.train.corpus import Engines
    from outstride.train.write import Order

TOKENS = 500_000
ON_A_CARD = 512
ELSEWHERE = 32


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "write-data",
        help="let the model write its own training words",
        description="The model writes prompts from its own chat opening, of several kinds of tasks, "
        "and answers them. The same command goes on where it was broken off; the same seed writes the "
        "same words.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"alias, GGUF file, checkpoint folder or hub id (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the words")
    much = parser.add_mutually_exclusive_group()
    much.add_argument(
        "--tokens", type=int, metavar="N", help=f"of answers, in all (default {TOKENS:,})"
    )
    much.add_argument("--minutes", type=float, metavar="M", help="how long to write instead")
    _add_texts(parser)
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"texts at once (default {ELSEWHERE}; {ON_A_CARD} with --weights bf16)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that share them, each with the model (default 1; on a card one for each 128 "
        "texts at once, as far as there are cores)",
    )
    add_weights_option(parser)
    parser.set_defaults(action=run)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    """Adds what is said of the texts: which prompts, and how they are answered."""
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help=".txt or .jsonl of prompts that are answered first; may be given again",
    )
    parser.add_argument(
        "--kinds",
        type=float,
        default=0.75,
        metavar="SHARE",
        help="of the model's own prompts, how many begin with the stem of a task: maths, translation, "
        "summary, question, … (default 0.75; 0: none)",
    )
    parser.add_argument(
        "--passages",
        default="",
        metavar="FOLDER",
        help="words that were written before: every prompt is about a passage that is put together "
        "from their answers, which makes long prompts cheap",
    )
    parser.add_argument(
        "--max-passage",
        type=int,
        default=900,
        metavar="N",
        help="tokens of such passages in a prompt (default 900)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of the model's own prompts (default 1.0)"
    )
    parser.add_argument(
        "--answers",
        default="greedy=0.6,sampled=0.4",
        metavar="SHARES",
        help="how answers are decoded (default greedy=0.6,sampled=0.4; sampled at 0.8)",
    )
    parser.add_argument(
        "--max-prompt", type=int, default=96, metavar="N", help="tokens (default 96)"
    )
    parser.add_argument(
        "--max-answer", type=int, default=384, metavar="N", help="tokens (default 384)"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Writes."""
    del context  # the model needs room for many sequences, and may run in several processes
    import sys

    from outstride.cli.progress import progress, seconds_text
    from outstride.models.load import choose_weights, locate, opened
    from outstride.train.corpus import Desk, Goal, Standing, write
    from outstride.train.words import Words

    order = _order(args)
    tokens = TOKENS if args.tokens is args.minutes is None else args.tokens
    goal = Goal(tokens, args.minutes)
    engines = _engines(args)
    choose_weights(args.weights)
    config, _, tokenizer = opened(locate(args.model))
    about = {
        "model": args.model,
        "vocabulary": tokenizer.digest,
        "vocab_size": config.vocab_size,
        "end": min(tokenizer.eos_ids, default=0),
        "weights": args.weights,
        "order": order.about(),
    }
    words = Words.create(args.out, about)
    with progress("writing") as show:

        def say(now: Standing) -> None:
            text = f"{now.texts:,} texts, {now.tokens:,} tokens, {now.rate:,.0f} tokens/s"
            left = seconds_text(now.left) if now.left else "finishing what is under way"
            show(
                1.0 if now.ended else min(now.share, 0.99), text if now.ended else f"{text}, {left}"
            )

        desk = Desk.at(words, goal, say)
        if desk.texts:
            print(f"{args.out} holds {desk.texts:,} texts; going on", file=sys.stderr)
        write(engines, order, desk)
    print(f"{args.out}: {desk.texts:,} texts, {desk.tokens:,} tokens of answers")
    return 0


def _order(args: argparse.Namespace) -> Order:
    from outstride.bench.prompts import read_prompts
    from outstride.train.write import Order

    options = (
        registry.Option("greedy", float, 0.6, False),
        registry.Option("sampled", float, 0.4, False),
    )
    shares = registry.read_options("--answers", options, args.answers)
    greedy = shares.get("greedy", 1.0 - shares.get("sampled", 1.0))
    if abs(greedy + shares.get("sampled", 1.0 - greedy) - 1.0) > 1e-6:
        raise InvalidParams(f"the shares of --answers add up to 1; {args.answers} does not")
    prompts = [prompt.text for file in args.prompts for prompt in read_prompts(file)]
    return Order(
        seed=args.seed,
        temperature=args.temperature,
        greedy=greedy,
        kinds=args.kinds,
        max_prompt=args.max_prompt,
        max_answer=args.max_answer,
        prompts=tuple(prompts),
        passages=args.passages,
        max_passage=args.max_passage,
    )


def _engines(args: argparse.Namespace) -> Engines:
    from outstride.train.corpus import HEAD, Engines

    card = args.weights == "bf16"
    concurrency = args.concurrency
    if concurrency is None:
        concurrency = ON_A_CARD if card else ELSEWHERE
    workers = args.workers
    if workers is None:
        workers = min(-(-concurrency // HEAD), max(1, (os.cpu_count() or 1) - 1)) if card else 1
    return Engines(args.model, args.weights, concurrency, workers)
