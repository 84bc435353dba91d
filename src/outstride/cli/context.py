"""What commands are given: the way to a model. Tests give them another one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outstride import registry
from outstride.cli import screen

if TYPE_CHECKING:
    from outstride.llm import LLM

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Context:
    """The seam between commands and models."""

    load: Callable[[str, str], LLM]
    """A model by name and weights format."""


def usual() -> Context:
    """The context of the real program."""
    return Context(load=_load)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, and in which format it computes."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"alias, GGUF file, checkpoint folder or hub id (default {DEFAULT_MODEL})",
    )
    add_weights_option(parser)


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """In which format a model computes."""
    parser.add_argument(
        "--weights",
        choices=("auto", "int8", "int4", "fp32", "bf16"),
        default="auto",
        help="format to compute in: int8 or int4 on native CPU kernels (int4 in groups of 32, the "
        "head in int8), fp32 on the torch reference, bf16 on an NVIDIA card "
        "(default auto: int8 where the kernels were built)",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """With which adapter a model fills in masks."""
    parser.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="a diffusion adapter for the model, with which it fills in masks, too: what `outstride "
        "train diffusion-adapter` made, or `shipped` for the one that comes with the package",
    )


def loaded(args: argparse.Namespace, context: Context) -> LLM:
    """The model that a command was told, with its adapter."""
    llm = context.load(args.model, args.weights)
    if args.adapter is not None:
        try:
            llm.adapt(args.adapter)
        except BaseException:
            llm.close()
            raise
    return llm


def _load(name: str, weights: str) -> LLM:
    from outstride.models.load import locate

    locate(name)  # a download shows its own progress, which a spinner would garble
    with screen.waiting(f"loading {name}"):
        from outstride.llm import LLM

        llm = LLM(name, weights=weights)
    print(f"{name}: {llm.model.ops.name}", file=sys.stderr)
    return llm


def check_method(spec: str | None) -> None:
    """Refuses a method that does not exist before a model is loaded for it."""
    registry.discover()
    if spec is not None:
        registry.parse(spec)
