"""`outstride write-data`: the model writes the corpus that its own draft heads are trained on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride import registry
from outstride.cli.context import DEFAULT_MODEL, Context, add_device_option, add_weights_option
from outstride.errors import InvalidParams

if TYPE_CHECKING:
    from outstride.models.choose_weights import Placement
    from outstride.train.corpus import CorpusEngines
    from outstride.train.generate_data import CorpusSpec

TOKENS = 500_000
ON_GPU = 512
ON_CPU = 32


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "write-data",
        help="let the model write its own training corpus",
        description="The model writes prompts from its own chat opening, of several kinds of tasks, "
        "and answers them. The same command resumes an interrupted run; the same seed writes the same "
        "texts.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"alias, GGUF file, checkpoint folder or hub id (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="corpus folder")
    much = parser.add_mutually_exclusive_group()
    much.add_argument(
        "--tokens", type=int, metavar="N", help=f"total answer tokens (default {TOKENS:,})"
    )
    much.add_argument("--minutes", type=float, metavar="M", help="how long to write instead")
    _add_texts(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"texts at once (default {ON_CPU}; {ON_GPU} on a GPU)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that share them, each with the model (default 1; on a GPU one for each 128 "
        "texts at once, up to the number of cores)",
    )
    add_device_option(parser)
    add_weights_option(parser)
    parser.set_defaults(action=run)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    """Adds the options of prompts and answers."""
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help=".txt or .jsonl of prompts that are answered first; may be given several times",
    )
    parser.add_argument(
        "--kinds",
        type=float,
        default=0.75,
        metavar="SHARE",
        help="share of the model's own prompts that begin with a task template: maths, translation, "
        "summary, question, … (default 0.75; 0: none)",
    )
    parser.add_argument(
        "--passages",
        default="",
        metavar="FOLDER",
        help="an earlier corpus: every prompt is about a passage that is assembled from its answers, "
        "which makes long prompts cheap",
    )
    parser.add_argument(
        "--max-passage",
        type=int,
        default=900,
        metavar="N",
        help="tokens of such passages in a prompt (default 900)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="temperature of the model's own prompts (default 1.0)",
    )
    parser.add_argument(
        "--answers",
        default="greedy=0.6,sampled=0.4",
        metavar="SHARES",
        help="how answers are decoded (default greedy=0.6,sampled=0.4; sampled at 0.8)",
    )
    parser.add_argument(
        "--max-prompt",
        type=int,
        default=96,
        metavar="N",
        help="largest number of tokens of a prompt (default 96)",
    )
    parser.add_argument(
        "--max-answer",
        type=int,
        default=384,
        metavar="N",
        help="largest number of tokens of an answer (default 384)",
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Writes a corpus."""
    del context  # the model needs a larger KV cache, and may run in several processes
    import sys

    from outstride.cli.progress import progress, seconds_text
    from outstride.models.choose_weights import place, placements
    from outstride.models.load import locate, opened
    from outstride.train.corpus import CorpusGoal, CorpusProgress, CorpusWriter, write
    from outstride.train.corpus_files import Corpus

    spec = _spec(args)
    tokens = TOKENS if args.tokens is args.minutes is None else args.tokens
    goal = CorpusGoal(tokens, args.minutes)
    allowed = placements(args.device, args.weights)
    config, _, tokenizer = opened(locate(args.model))
    placement = place(config, allowed)
    engines = _engines(args, placement)
    about = {
        "model": args.model,
        "vocabulary": tokenizer.digest,
        "vocab_size": config.vocab_size,
        "end": min(tokenizer.eos_ids, default=0),
        "device": placement.device,
        "weights": placement.weights,
        "spec": spec.about(),
    }
    corpus = Corpus.create(args.out, about)
    with progress("writing") as show:

        def say(now: CorpusProgress) -> None:
            text = f"{now.texts:,} texts, {now.tokens:,} tokens, {now.rate:,.0f} tokens/s"
            left = seconds_text(now.left) if now.left else "finishing running texts"
            show(
                1.0 if now.ended else min(now.share, 0.99), text if now.ended else f"{text}, {left}"
            )

        writer = CorpusWriter.at(corpus, goal, say)
        if writer.texts:
            print(f"{args.out} holds {writer.texts:,} texts; continuing", file=sys.stderr)
        write(engines, spec, writer)
    print(f"{args.out}: {writer.texts:,} texts, {writer.tokens:,} tokens of answers")
    return 0


def _spec(args: argparse.Namespace) -> CorpusSpec:
    from outstride.bench.prompts import read_prompts
    from outstride.train.generate_data import CorpusSpec

    options = (
        registry.Option("greedy", float, 0.6, False),
        registry.Option("sampled", float, 0.4, False),
    )
    shares = registry.read_options("--answers", options, args.answers)
    greedy = shares.get("greedy", 1.0 - shares.get("sampled", 1.0))
    if abs(greedy + shares.get("sampled", 1.0 - greedy) - 1.0) > 1e-6:
        raise InvalidParams(f"the shares of --answers add up to 1; {args.answers} does not")
    prompts = [prompt.text for file in args.prompts for prompt in read_prompts(file)]
    return CorpusSpec(
        seed=args.seed,
        temperature=args.temperature,
        greedy=greedy,
        template_share=args.kinds,
        max_prompt=args.max_prompt,
        max_answer=args.max_answer,
        prompts=tuple(prompts),
        passages=args.passages,
        max_passage=args.max_passage,
    )


def _engines(args: argparse.Namespace, placement: Placement) -> CorpusEngines:
    from outstride.train.corpus import SEQUENCES_PER_PROCESS, CorpusEngines

    gpu = placement.device == "cuda"
    concurrency = args.concurrency
    if concurrency is None:
        concurrency = ON_GPU if gpu else ON_CPU
    workers = args.workers
    if workers is None:
        workers = (
            min(-(-concurrency // SEQUENCES_PER_PROCESS), max(1, (os.cpu_count() or 1) - 1))
            if gpu
            else 1
        )
    return CorpusEngines(args.model, placement.weights, concurrency, workers, placement.device)
