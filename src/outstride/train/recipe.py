"""Recipes by name. A recipe says what is trained beside a model, from which loss, and how good it is.

One file per recipe; being registered puts it into `outstride train`. Its options are the keyword-only
arguments of its constructor, and what it is, makes and stands on is read from its docstring, exactly
as with methods (`outstride.registry`). The loop that trains it is `train.fit`, the same for all.
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

    from outstride.train.target import Target
    from outstride.train.words import Rows

FIELDS = ("Paper", "Makes")
"""What the docstring of a recipe says in one line each: where it is from; the method that uses it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """How good a trained part is on texts that it was not trained on."""

    tokens_per_pass: float
    """What a pass of the target is expected to settle, along a decode."""
    by_depth: Sequence[float] = ()
    """How often the first 1, 2, … guesses are all right."""
    overhead: float = 0.0
    """What drafting costs besides, in passes of one node of the target."""
    carried: float = 0.0
    """Nodes that each node of a pass carries for each guess of the next draft, in the same pass."""
    figures: dict[str, float] = field(default_factory=dict)
    """Whatever else is worth knowing."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "by_depth": [round(share, 4) for share in self.by_depth],
            "overhead": round(self.overhead, 4),
            "carried": round(self.carried, 4),
            **{name: round(value, 5) for name, value in self.figures.items()},
        }


class Recipe(ABC):
    """What is trained, and how well it does.

    The constructor takes the target and keyword-only options of type int, float, str or bool. It and
    `prepare` fill `weights`; torch's own random numbers stand at the run's seed when they are called,
    so that what they draw is a function of it.
    """

    name: ClassVar[str] = ""
    changes_target: ClassVar[bool] = False
    """Whether it fine-tunes the model itself, which the command then says loudly. Its result is a
    checkpoint folder and no part: see `train.whole`."""
    target: Target
    weights: dict[str, torch.Tensor]
    """What is trained: float32 on the target's device. `fit` makes leaves with gradients of them."""
    progress: float = 0.0
    """How much of the training is done, from 0 to 1: `fit` says so before each step."""

    @abstractmethod
    def __init__(self, target: Target, **options: Any) -> None: ...

    def prepare(self, rows: Rows) -> None:
        """Looks at all training rows once, before the first step; also when a run goes on."""
        del rows

    @abstractmethod
    def loss(self, rows: Rows, numbers: torch.Generator) -> torch.Tensor:
        """The loss of a batch that is on the device already; under bfloat16 autocast on a card.

        A recipe whose loss torch can compile compiles it itself: batches are always of one size.
        """

    @abstractmethod
    def measure(self, held: Rows) -> Measured:
        """How good the weights are now, on held-out rows. No gradients; draws nothing."""

    def config(self) -> dict[str, Any]:
        """What the result's config.json says besides its kind, version and target."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Further tensors that belong to the result but are not trained."""
        return {}

    def write(self, folder: Path, about: Mapping[str, Any], *, int8: bool) -> int:
        """Leaves the result in a folder; how many bytes its weights have.

        about: kind, version and target, which a part's config.json begins with.
        """
        from outstride.train.checkpoint import write_model

        tensors = {**self.weights, **self.state()}
        return write_model(folder, {**about, **self.config()}, tensors, int8=int8)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a recipe without making one."""

    name: str
    summary: str
    paper: str
    makes: str
    changes_target: bool
    options: tuple[Option, ...]
    recipe: type[Recipe]


R = TypeVar("R", bound=type[Recipe])
_recipes: dict[str, Entry] = {}


def recipe(name: str) -> Callable[[R], R]:
    """Registers a recipe."""

    def register(cls: R) -> R:
        about = describe(cls, FIELDS)
        if name in _recipes:
            raise TypeError(f"two recipes are called {name!r}")
        _recipes[name] = Entry(
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
    """Imports every module beside this one, which registers the recipes in them."""
    package = importlib.import_module("outstride.train")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"outstride.train.{module.name}")


def entries() -> list[Entry]:
    """All recipes, by name."""
    return [_recipes[name] for name in sorted(_recipes)]


def entry(name: str) -> Entry:
    """One recipe; an unknown name is answered with near ones."""
    if name not in _recipes:
        near = difflib.get_close_matches(name, _recipes, n=3, cutoff=0.5)
        known = ", ".join(sorted(_recipes)) or "none"
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {known}"
        raise UnknownMethod(f"unknown recipe {name!r}; {hint}")
    return _recipes[name]


def options(found: Entry, text: str) -> dict[str, Any]:
    """All options of a recipe with their values: those in `key=value,key=value`, else the defaults."""
    given = read_options(f"recipe {found.name!r}", found.options, text)
    if missing := [o.name for o in found.options if o.required and o.name not in given]:
        raise UnknownMethod(f"recipe {found.name!r} needs {missing[0]}: --set {missing[0]}=…")
    return {option.name: given.get(option.name, option.default) for option in found.options}


def build(found: Entry, target: Target, values: dict[str, Any], seed: int = 0) -> Recipe:
    """A recipe for a target."""
    import torch

    torch.manual_seed(seed)
    try:
        return found.recipe(target, **values)
    except ValueError as error:
        raise UnknownMethod(f"{found.name}: {error}") from error
