"""How commands get a model: the options that name it, and the function that loads it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outstride import registry
from outstride.cli import screen
from outstride.models.choose_weights import DEVICES, WEIGHTS

if TYPE_CHECKING:
    from outstride.llm import LLM

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Context:
    """The way from commands to models. Tests replace it to run commands on another model."""

    load: Callable[[str, str, str], LLM]
    """Loads a model by its name, device and weights format."""


def usual() -> Context:
    """The context of the real program."""
    return Context(load=_load)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which model runs, where, and in which weights format."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"alias, GGUF file, checkpoint folder or hub id (default {DEFAULT_MODEL})",
    )
    add_device_option(parser)
    add_weights_option(parser)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that says on which device a model runs."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="device that the model runs on (default auto: an NVIDIA GPU if one works and runs the "
        "model, else the CPU)",
    )


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that says in which weights format a model runs."""
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="auto",
        help="format of the weights: fp32, int8 or int4 on a CPU (int4 in groups of 32, LM head in "
        "int8), bf16 on a GPU (default auto: bf16 on a GPU; on a CPU int8 with the native kernels, "
        "or int4 for a 4-bit file on AVX2 without VNNI; fp32 without kernels)",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names a diffusion adapter."""
    parser.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="LoRA adapter with which an autoregressive model also fills in masks, as `outstride train "
        "diffusion-adapter` writes it; `shipped` takes the one of the package",
    )


def loaded(args: argparse.Namespace, context: Context) -> LLM:
    """The model that the options name, with its adapter."""
    llm = context.load(args.model, args.device, args.weights)
    if args.adapter is not None:
        try:
            llm.adapt(args.adapter)
        except BaseException:
            llm.close()
            raise
    return llm


def _load(name: str, device: str, weights: str) -> LLM:
    from outstride.models.choose_weights import placements
    from outstride.models.load import locate

    if (device, weights) != ("auto", "auto"):
        placements(device, weights)  # what this machine cannot do is refused before a download
    locate(name)  # a download shows its own progress, which a spinner would garble
    with screen.waiting(f"loading {name}"):
        from outstride.llm import LLM

        llm = LLM(name, device=device, weights=weights)
    print(f"{name}: {llm.model.ops.name}", file=sys.stderr)
    return llm


def check_method(spec: str | None) -> None:
    """Refuses a method that does not exist, before a model is loaded for it."""
    registry.discover()
    if spec is not None:
        registry.parse(spec)
