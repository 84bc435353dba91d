"""Recipes by name. A recipe defines what is trained for a model, its loss, and its measurement.

One file per recipe; registering it adds it to `outstride train`. Its options are the keyword-only
arguments of its constructor, and its description is parsed from its docstring, exactly as with
methods (`outstride.registry`). The training loop is `train.fit`, the same for all.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from outstride.errors import UnknownMethod
from outstride.registry import Option, describe, options_of, read_options

if TYPE_CHECKING:
    import torch

    from outstride.train.corpus_files import TrainingRows
    from outstride.train.target import Target

FIELDS = ("Paper", "Makes")
"""Fields of a recipe's docstring: its papers; the method that uses the result."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """How good a draft head is on held-out texts."""

    tokens_per_pass: float
    """Expected tokens that a pass of the target settles, along a decode."""
    by_depth: Sequence[float] = ()
    """How often the first 1, 2, … draft tokens are all accepted."""
    overhead: float = 0.0
    """Cost of drafting, in passes of the target over one node."""
    masks_per_node: float = 0.0
    """Mask nodes for the next draft that each node of a pass has, per draft token, in the same pass."""
    figures: dict[str, float] = field(default_factory=dict)
    """Other figures."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "by_depth": [round(share, 4) for share in self.by_depth],
            "overhead": round(self.overhead, 4),
            "masks_per_node": round(self.masks_per_node, 4),
            **{name: round(value, 5) for name, value in self.figures.items()},
        }


class Recipe(ABC):
    """What is trained, and how good it is.

    The constructor takes the target and keyword-only options of type int, float, str or bool. It and
    `prepare` fill `weights`; torch's random generator is at the run's seed when they are called, so
    that what they sample is a function of it.
    """

    name: ClassVar[str] = ""
    changes_target: ClassVar[bool] = False
    """Whether it fine-tunes the model itself, which the command then announces. Its result is a
    checkpoint folder and no draft head: see `train.full_finetune`.
    """
    target: Target
    weights: dict[str, torch.Tensor]
    """What is trained: float32 on the target's device. `fit` turns them into leaves with gradients."""
    progress: float = 0.0
    """Share of the training that is done; `fit` sets it before each step."""

    @abstractmethod
    def __init__(self, target: Target, **options: Any) -> None: ...

    def prepare(self, rows: TrainingRows) -> None:
        """Called once with all training rows before the first step, also when a run resumes."""
        del rows

    @abstractmethod
    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """The loss of a batch on the device, under bfloat16 autocast on a GPU.

        A recipe whose loss torch can compile compiles it itself: batches always have one size.
        """

    @abstractmethod
    def measure(self, held: TrainingRows) -> Measurement:
        """How good the weights are now, on held-out rows. No gradients, no random numbers."""

    def config(self) -> dict[str, Any]:
        """Fields of the result's config.json besides its kind, version and target."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Further tensors of the result that are not trained."""
        return {}

    def write(self, folder: Path, about: Mapping[str, Any], *, int8: bool) -> int:
        """Writes the result to a folder; returns the bytes of its weights.

        about: kind, version and target, the first fields of a draft head's config.json.
        """
        from outstride.train.checkpoint import write_model

        tensors = {**self.weights, **self.state()}
        return write_model(folder, {**about, **self.config()}, tensors, int8=int8)


@dataclass(frozen=True, slots=True)
class RecipeEntry:
    """The description of a recipe."""

    name: str
    summary: str
    paper: str
    makes: str
    changes_target: bool
    options: tuple[Option, ...]
    recipe: type[Recipe]


R = TypeVar("R", bound=type[Recipe])
_recipes: dict[str, RecipeEntry] = {}


def recipe(name: str) -> Callable[[R], R]:
    """Registers a recipe."""

    def register(cls: R) -> R:
        about = describe(cls, FIELDS)
        if name in _recipes:
            raise TypeError(f"two recipes are called {name!r}")
        _recipes[name] = RecipeEntry(
            name=name,
            summary=about["summary"],
            paper=about["Paper"],
            makes=about["Makes"],
            changes_target=cls.changes_target,
            options=options_of(cls),
            recipe=cls,
        )
        cls.name = name
        return cls

    return register


def discover() -> None:
    """Imports every module of this package, which registers its recipes."""
    package = importlib.import_module("outstride.train")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"outstride.train.{module.name}")


def entries() -> list[RecipeEntry]:
    """All recipes, by name."""
    return [_recipes[name] for name in sorted(_recipes)]


def entry(name: str) -> RecipeEntry:
    """One recipe; the error for an unknown name suggests similar ones."""
    if name not in _recipes:
        near = difflib.get_close_matches(name, _recipes, n=3, cutoff=0.5)
        known = ", ".join(sorted(_recipes)) or "none"
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {known}"
        raise UnknownMethod(f"unknown recipe {name!r}; {hint}")
    return _recipes[name]


def options(found: RecipeEntry, text: str) -> dict[str, Any]:
    """All options of a recipe with their values: those in `key=value,key=value`, else the defaults."""
    given = read_options(f"recipe {found.name!r}", found.options, text)
    if missing := [o.name for o in found.options if o.required and o.name not in given]:
        raise UnknownMethod(f"recipe {found.name!r} needs {missing[0]}: --set {missing[0]}=…")
    return {option.name: given.get(option.name, option.default) for option in found.options}


def build(found: RecipeEntry, target: Target, values: dict[str, Any], seed: int = 0) -> Recipe:
    """Creates a recipe for a target."""
    import torch

    torch.manual_seed(seed)
    try:
        return found.recipe(target, **values)
    except ValueError as error:
        raise UnknownMethod(f"{found.name}: {error}") from error
