"""How commands get a model: the options that name it, and the function that loads it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outstride import registry
from outstride.cli import screen
from outstride.errors import InvalidParams
from outstride.models.bridge import TRUST_VARIABLE
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
    parser.add_argument(
        "--trust-remote-code",
        action=_TrustRemoteCode,
        nargs=0,
        help="lets transformers run Python code of the model's repository, for an architecture that is "
        "neither built in nor part of transformers",
    )


class _TrustRemoteCode(argparse.Action):
    """Sets an environment variable, which an engine in a process of its own inherits."""

    def __call__(self, *_: object) -> None:
        os.environ[TRUST_VARIABLE] = "1"


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
    """Adds the option that names LoRA adapters, and the diffusion adapter."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="NAME=FOLDER: LoRA adapter in PEFT's format; may be repeated. The server lists it as a "
        "model of that name; other commands run with the first one. FOLDER alone: adapter with "
        "which an autoregressive model also fills in masks, as `outstride train "
        "diffusion-adapter` writes it; `shipped` takes the one of the package",
    )


def adapters_of(args: argparse.Namespace) -> tuple[str | None, dict[str, str]]:
    """The folder of the diffusion adapter, and the folders of LoRA adapters by name."""
    diffusion, named = None, {}
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not equals:
            if diffusion is not None:
                raise InvalidParams(
                    "there can be one diffusion adapter; LoRA needs --adapter NAME=FOLDER"
                )
            diffusion = text
        elif not name or not folder or name in named:
            raise InvalidParams(f"--adapter {text}: write NAME=FOLDER, each name once")
        else:
            named[name] = folder
    return diffusion, named


def loaded(args: argparse.Namespace, context: Context) -> LLM:
    """The model that the options name, with its adapters."""
    diffusion, named = adapters_of(args)
    llm = context.load(args.model, args.device, args.weights)
    try:
        if diffusion is not None:
            llm.adapt(diffusion)
        for name, folder in named.items():
            llm.load_adapter(name, folder)
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
