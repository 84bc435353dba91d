"""Methods by name: the file of a method registers it, and every surface reads this list.

A method is written `name` or `name:key=value,key=value`. It is registered on one class, whose
constructor's keyword arguments are its options. The class is a drafter; it is its own acceptor, or it
names a shared one. Summary, needs and cost are read from the class docstring, so that one text serves
the code, the command line and the tables.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, TypeVar

from outstride.core.contracts import Acceptor, Drafter, Exactness, Method
from outstride.errors import UnknownMethod

D = TypeVar("D", bound=type[Drafter])
A = TypeVar("A", bound=type[Acceptor])

FIELDS = ("Paper", "Exactness", "Needs", "Cost per step")
PACKAGES = ("outstride.draft", "outstride.accept", "outstride.diffusion", "outstride.policy")
"""Where methods and acceptors are registered."""
RENAMED_OPTIONS = {"least": ("min_prob", "min_layers")}
"""Old names of options, and those that took their place, in one method or another."""


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument that a method takes."""

    name: str
    type: type
    default: Any
    required: bool


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """What is known of a method before it is built."""

    name: str
    family: str
    summary: str
    details: str
    """How it works and what its options mean: the docstring between summary and fields."""
    exactness: Exactness
    exact_to: str
    needs: tuple[str, ...]
    paper: str
    cost: str
    options: tuple[Option, ...]
    drafter: type[Drafter]
    acceptor: str
    """The name of a shared acceptor; empty where the drafter is its own acceptor."""

    @property
    def example(self) -> str:
        """A spec as one would type it: required options, and one more."""
        shown = [f"{o.name}={o.name.upper()}" for o in self.options if o.required]
        optional = [o for o in self.options if not o.required and o.default != ""]
        shown += [f"{o.name}={_written(o.default)}" for o in optional[:1]]
        return f"{self.name}:{','.join(shown)}" if shown else self.name


_methods: dict[str, MethodEntry] = {}
_acceptors: dict[str, type[Acceptor]] = {}


def describe(cls: type, fields: tuple[str, ...] = FIELDS) -> dict[str, str]:
    """The summary, the details and the fields of a class, from its docstring."""
    text = inspect.cleandoc(cls.__doc__ or "")
    paragraphs = [part.replace("\n", " ").strip() for part in text.split("\n\n")]
    details = [part for part in paragraphs[1:] if not part.startswith(f"{fields[0]}: ")]
    found = {"summary": paragraphs[0], "details": "\n\n".join(details)}
    for name in fields:
        lines = [i for i, line in enumerate(text.splitlines()) if line.startswith(f"{name}: ")]
        if len(lines) != 1:
            raise TypeError(f"{cls.__name__}: the docstring needs one line '{name}: …'")
        value = [text.splitlines()[lines[0]][len(name) + 2 :]]
        for line in text.splitlines()[lines[0] + 1 :]:
            if not line.startswith("  "):
                break
            value.append(line.strip())
        found[name] = " ".join(value)
    return found


def _exact_to(text: str) -> str:
    """The method whose text it returns: `exact to steps`; `plain` unless the field says otherwise."""
    words = text.split()
    return words[2].strip(".,;") if words[:2] == ["exact", "to"] else "plain"


_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a class: the keyword-only arguments of its constructor."""
    options = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:  # type: ignore[misc]
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        kind = _TYPES.get(getattr(parameter.annotation, "__name__", str(parameter.annotation)))
        if kind is None:
            raise TypeError(
                f"{cls.__name__}: option {parameter.name} must be int, float, str or bool"
            )
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        name = parameter.name.removesuffix("_")  # an option may be a keyword of Python
        options.append(Option(name, kind, default, required))
    return tuple(options)


def method(name: str, *, family: str, acceptor: str = "match") -> Callable[[D], D]:
    """Registers a drafter as a method.

    A class that is an acceptor too judges its own drafts. Every other one is joined with a shared
    acceptor by its name; the default verifies by equality.
    """

    def register(cls: D) -> D:
        about = describe(cls)
        if name in _methods:
            raise TypeError(f"two methods are called {name!r}")
        needs = about["Needs"]
        _methods[name] = MethodEntry(
            name=name,
            family=family,
            summary=about["summary"],
            details=about["details"],
            exactness=Exactness(about["Exactness"].split()[0].strip(".,;")),
            exact_to=_exact_to(about["Exactness"]),
            needs=() if needs == "nothing" else tuple(x.strip() for x in needs.split(",")),
            paper=about["Paper"],
            cost=about["Cost per step"],
            options=options_of(cls),
            drafter=cls,
            acceptor="" if issubclass(cls, Acceptor) else acceptor,
        )
        cls.name = name
        return cls

    return register


def acceptor(name: str) -> Callable[[A], A]:
    """Registers a shared acceptor under a name that methods refer to. It takes no options: a rule
    that has some belongs in the class of its method."""

    def register(cls: A) -> A:
        if options := options_of(cls):
            raise TypeError(
                f"{cls.__name__}: a shared acceptor takes no options, but it has "
                f"{options[0].name}; declare it in the class of the method"
            )
        _acceptors[name] = cls
        cls.name = name
        return cls

    return register


def discover() -> None:
    """Imports every module that registers methods or acceptors."""
    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")


def entries() -> list[MethodEntry]:
    """All methods, by name."""
    return [_methods[name] for name in sorted(_methods)]


def entry(name: str) -> MethodEntry:
    """One method; the error for an unknown name suggests similar ones."""
    if name not in _methods:
        near = difflib.get_close_matches(name, _methods, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(_methods)}"
        raise UnknownMethod(f"unknown method {name!r}; {hint}")
    return _methods[name]


def parse(spec: str) -> tuple[MethodEntry, dict[str, Any]]:
    """The entry and the options of `name` or `name:key=value,…`."""
    name, _, rest = spec.partition(":")
    found = entry(name.strip())
    values = read_options(f"method {found.name!r}", found.options, rest)
    if missing := [o.name for o in found.options if o.required and o.name not in values]:
        raise UnknownMethod(
            f"method {found.name!r} needs {missing[0]}: write {found.name}:{missing[0]}=…"
        )
    return found, values


def read_options(owner: str, options: Iterable[Option], text: str) -> dict[str, Any]:
    """The values in `key=value,key=value`, for options that `owner` has."""
    known = {option.name: option for option in options}
    values: dict[str, Any] = {}
    last: Option | None = None
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        option = known.get(key.strip())
        if option is None:
            _check_renamed(owner, key.strip(), known)
        if (option is None or not equals) and last is not None and last.type is str:
            values[last.name] += "," + part  # a comma within the value of a text option
            continue
        last = option
        if option is None or not equals:
            raise UnknownMethod(
                f"{owner} has no option {key.strip()!r}"
                + (f"; it has {', '.join(known)}" if known else "; it has none")
            )
        values[option.name] = _convert(owner, option, value.strip())
    return values


def _check_renamed(owner: str, key: str, known: Mapping[str, Option]) -> None:
    """Raises an error that names the new option if `key` is the old name of one that is known."""
    for new in RENAMED_OPTIONS.get(key, ()):
        if new in known:
            raise UnknownMethod(f"{owner} has no option {key!r} any more: it is called {new!r} now")


def baseline(spec: str) -> str:
    """The spec that a method is compared with: the one it is exact to, with the options of both.

    A lossy method for masked models is compared with `steps`, every other one with `plain`.
    """
    found, values = parse(spec)
    masked = bool(found.drafter.masked_models) and found.exact_to == "plain"
    name = "steps" if masked else found.exact_to
    shared = {option.name for option in entry(name).options} & set(values)
    options = ",".join(f"{key}={values[key]}" for key in values if key in shared)
    return f"{name}:{options}" if options else name


def _convert(name: str, option: Option, text: str) -> Any:
    if option.type is bool:
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
    else:
        try:
            return option.type(text)
        except ValueError:
            pass
    raise UnknownMethod(
        f"{name}: option {option.name} takes a value of type {option.type.__name__}, not {text!r}"
    )


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as arguments: names that are keywords of Python end with an underscore."""
    return {f"{name}_" if iskeyword(name) else name: options[name] for name in options}


def _written(value: Any) -> str:
    """A default as one would type it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def build(spec: str, **given: Any) -> Method:
    """A method as the user wrote it; `given` overrides options (a model's engine name)."""
    found, values = parse(spec)
    try:
        drafter = found.drafter(**_arguments({**values, **given}))
    except ValueError as error:
        raise UnknownMethod(f"{found.name}: {error}") from error
    if isinstance(drafter, Acceptor):
        judge: Acceptor = drafter
    else:
        judge = _acceptors[found.acceptor]()
    return Method(
        name=found.name,
        drafter=drafter,
        acceptor=judge,
        exactness=found.exactness,
        exact_to=found.exact_to,
        spec=spec,
    )
