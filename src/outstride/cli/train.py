"""`outstride train`: trains a draft head for a model on the model's own texts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import DEFAULT_MODEL, Context, add_weights_option
from outstride.errors import InvalidParams

if TYPE_CHECKING:
    from outstride.train.fit import TrainingResult, TrainingSchedule, TrainingState
    from outstride.train.recipe import Recipe, RecipeEntry

MINUTES = 20.0


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "train",
        help="train a draft head for a model, from the model's own texts",
        description="Trains a recipe on the corpus that `outstride write-data` wrote, and prints the "
        "expected tokens per pass. The same command resumes an interrupted training; the same seed "
        "gives the same weights.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe, such as block-drafter")
    parser.add_argument("--list", action="store_true", help="list the recipes and their options")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"alias, GGUF file, checkpoint folder or hub id (default {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="corpus folder; may be given several times",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the result")
    parser.add_argument(
        "--set", default="", metavar="KEY=VALUE,…", help="options of the recipe (see --list)"
    )
    _add_schedule(parser)
    parser.add_argument(
        "--int8", action="store_true", help="store large matrices in 8 bits instead of 16"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where torch finds a GPU)")
    parser.add_argument(
        "--no-forecast",
        action="store_true",
        help="do not measure the cost of passes here, and print no expected speed-up",
    )
    add_weights_option(parser)
    parser.set_defaults(action=run)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the training schedule."""
    long = parser.add_mutually_exclusive_group()
    long.add_argument("--steps", type=int, metavar="N", help="how many steps to train")
    long.add_argument(
        "--minutes", type=float, metavar="M", help=f"how long to train (default {MINUTES:g})"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        metavar="N",
        help="texts of full length per step (default 32); more of shorter ones",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=512,
        metavar="N",
        help="largest number of tokens of a text (default 512)",
    )
    parser.add_argument(
        "--peak", type=float, default=1e-3, help="highest learning rate (default 0.001)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--held",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="share of held-out texts to measure on (default 0.02)",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=0,
        metavar="N",
        help="steps between measurements (default: 8 in all)",
    )


def run(args: argparse.Namespace, context: Context) -> int:
    """Trains."""
    from outstride.train import recipe as recipes

    recipes.discover()
    if args.list:
        _list(recipes.entries())
        return 0
    if args.recipe is None or args.data is None or args.out is None:
        raise InvalidParams(
            "name a recipe, --data (a corpus folder) and --out (a folder for the result); "
            "`outstride train --list` shows the recipes"
        )
    found = recipes.entry(args.recipe)
    values = recipes.options(found, args.set)
    schedule = _schedule(args)
    fitted, made = _train(args, found, values, schedule)
    _say_result(fitted, found)
    if not args.no_forecast and fitted.trained["by_depth"]:
        _say_forecast(args, context, fitted, made)
    return 0


def _schedule(args: argparse.Namespace) -> TrainingSchedule:
    from outstride.train.fit import TrainingSchedule

    minutes = MINUTES if args.steps is args.minutes is None else args.minutes
    names = ("steps", "batch", "peak", "seed", "held", "every", "int8")
    return TrainingSchedule(minutes=minutes, **{name: getattr(args, name) for name in names})


def _train(
    args: argparse.Namespace, found: RecipeEntry, values: dict[str, Any], schedule: TrainingSchedule
) -> tuple[TrainingResult, Recipe]:
    import torch

    from outstride.cli.progress import progress, seconds_text
    from outstride.models.load import load_tokenizer, locate
    from outstride.train import recipe as recipes
    from outstride.train.corpus_files import Corpus, TrainingRows
    from outstride.train.fit import fit
    from outstride.train.target import Target

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if found.changes_target:
        print(
            f"note: {found.name} changes the model itself: the result is another model, whose "
            f"texts are not those of {args.model}",
            file=sys.stderr,
        )
    locate(args.model)
    digest = load_tokenizer(args.model).digest
    corpora = [Corpus.open(folder, digest) for folder in args.data]
    rows = TrainingRows.joined([corpus.rows(args.length) for corpus in corpora])
    about = corpora[0].about
    if len(corpora) > 1:
        about = {"folders": [corpus.about for corpus in corpora]}
    with screen.waiting(f"loading {args.model}"):
        target = Target.load(args.model, device)
    made = recipes.build(found, target, values, schedule.seed)
    print(f"{found.name}: {len(rows):,} texts, on {device}", file=sys.stderr)
    with progress("training") as show:

        def say(now: TrainingState) -> None:
            text = f"step {now.step:,} of {now.steps:,}, loss {now.loss:.3f}"
            if now.measured is not None:
                share = now.measured.tokens_per_pass
                print(
                    f"step {now.step:,}: {share:.3f} tokens per pass on held-out texts", flush=True
                )
            if now.step < now.steps:
                speed = f"{now.tokens_per_second:,.0f} tokens/s"
                text += f", {speed}, {seconds_text(now.left)}"
            show(now.step / now.steps, text)

        fitted = fit(made, rows, args.out, schedule, options=values, data=about, show=say)
    return fitted, made


def _say_result(fitted: TrainingResult, found: RecipeEntry) -> None:
    if fitted.was_finished:
        print(f"{fitted.folder} already holds this training")
    before, after = fitted.untrained["tokens_per_pass"], fitted.trained["tokens_per_pass"]
    print(f"expected tokens per pass: {after:.2f} (untrained {before:.2f}), on held-out texts")
    if fitted.trained["by_depth"]:
        shares = ", ".join(f"{share:.2f}" for share in fitted.trained["by_depth"])
        print(f"acceptance rate of the first 1, 2, … draft tokens: {shares}")
    use = f"decode with --method {found.makes}:from={fitted.folder}"
    if found.changes_target:
        use = f"another model than before: load it with --model {fitted.folder}"
    print(f"{fitted.folder}: {fitted.size / 1e6:.1f} MB; {use}")


def _say_forecast(
    args: argparse.Namespace, context: Context, fitted: TrainingResult, made: Recipe
) -> None:
    from outstride.train.speedup_estimate import cost_curve, estimate_speedup

    llm = context.load(args.model, "auto", args.weights)
    try:
        seconds = cost_curve(llm)
    finally:
        llm.close()
    trained = fitted.trained
    found = estimate_speedup(
        trained["by_depth"],
        trained.get("overhead", 0.0),
        seconds,
        trained.get("masks_per_node", 0.0),
    )
    if not found.draft_tokens:
        print(
            "expected speed-up on this machine: none; passes with drafts cost more than they gain"
        )
        return
    print(
        f"expected speed-up on this machine: {found.speedup:.2f}x over plain with {found.draft_tokens} "
        f"draft tokens, one request at a time ({found.tokens_per_pass:.2f} tokens per pass)"
    )


def _list(entries: list[RecipeEntry]) -> None:
    from rich.table import Table

    console = screen.console()
    for entry in entries:
        console.print(f"[bold]{entry.name}[/bold]: {entry.summary}", markup=True)
        changes = (
            "changes the model itself" if entry.changes_target else "the model stays unchanged"
        )
        console.print(f"  makes: {entry.makes}; {changes}\n  paper: {entry.paper}", markup=False)
        table = Table("option", "type", "default", box=None, padding=(0, 2))
        for option in entry.options:
            table.add_row(option.name, option.type.__name__, repr(option.default))
        console.print(table)
