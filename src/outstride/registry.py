"""Methods by name. A drafter file registers its methods; every surface reads this list.

A method is written `name` or `name:key=value,key=value`. Its options are the keyword arguments of
its drafter's constructor; what it is, needs and costs is read from the class docstring, so that one
text serves the code, the command line and the tables.
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


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument that a method takes."""

    name: str
    type: type
    default: Any
    required: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a method without making one."""

    name: str
    family: str
    summary: str
    exactness: Exactness
    exact_to: str
    needs: tuple[str, ...]
    paper: str
    cost: str
    options: tuple[Option, ...]
    drafter: type[Drafter]
    acceptor: str


_methods: dict[str, Entry] = {}
_acceptors: dict[str, type[Acceptor]] = {}


def describe(cls: type, fields: tuple[str, ...] = FIELDS) -> dict[str, str]:
    """The summary and the fields of a class, from its docstring."""
    text = inspect.cleandoc(cls.__doc__ or "")
    found = {"summary": text.split("\n\n")[0].replace("\n", " ").strip()}
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
    """Whose text it returns: `exact to steps`; plain decoding's unless it says otherwise."""
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
        name = parameter.name.removesuffix("_")  # an option may be a word of Python's
        options.append(Option(name, kind, default, required))
    return tuple(options)


def method(name: str, *, family: str, acceptor: str = "match") -> Callable[[D], D]:
    """Registers a drafter, joined with an acceptor, as a method."""

    def register(cls: D) -> D:
        about = describe(cls)
        if name in _methods:
            raise TypeError(f"two methods are called {name!r}")
        needs = about["Needs"]
        _methods[name] = Entry(
            name=name,
            family=family,
            summary=about["summary"],
            exactness=Exactness(about["Exactness"].split()[0].strip(".,;")),
            exact_to=_exact_to(about["Exactness"]),
            needs=() if needs == "nothing" else tuple(x.strip() for x in needs.split(",")),
            paper=about["Paper"],
            cost=about["Cost per step"],
            options=options_of(cls),
            drafter=cls,
            acceptor=acceptor,
        )
        cls.name = name
        return cls

    return register


def acceptor(name: str) -> Callable[[A], A]:
    """Registers an acceptor under a name that methods refer to.

    Its keyword arguments are filled from the options of the same names of the method's drafter.
    """

    def register(cls: A) -> A:
        _acceptors[name] = cls
        cls.name = name
        return cls

    return register


def discover() -> None:
    """Imports every drafter and acceptor of the package, which registers them."""
    for package in ("outstride.draft", "outstride.accept"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")


def entries() -> list[Entry]:
    """All methods, by name."""
    return [_methods[name] for name in sorted(_methods)]


def entry(name: str) -> Entry:
    """One method; an unknown name is answered with near ones."""
    if name not in _methods:
        near = difflib.get_close_matches(name, _methods, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(_methods)}"
        raise UnknownMethod(f"unknown method {name!r}; {hint}")
    return _methods[name]


def parse(spec: str) -> tuple[Entry, dict[str, Any]]:
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
        if (option is None or not equals) and last is not None and last.type is str:
            values[last.name] += "," + part  # a comma within a text
            continue
        last = option
        if option is None or not equals:
            raise UnknownMethod(
                f"{owner} has no option {key.strip()!r}"
                + (f"; it has {', '.join(known)}" if known else "; it has none")
            )
        values[option.name] = _convert(owner, option, value.strip())
    return values


def baseline(spec: str) -> str:
    """What a method is compared with: what it is exact to, with the options that both have.

    A lossy method for masked models is compared with `steps`, every other one with `plain`.
    """
    found, values = parse(spec)
    masked = bool(found.drafter.fills) and found.exact_to == "plain"
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


def _spelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as arguments: those that are words of Python's have a mark behind them."""
    return {f"{name}_" if iskeyword(name) else name: options[name] for name in options}


def build(spec: str, **given: Any) -> Method:
    """A method as the user wrote it; `given` overrides options (a model's engine name)."""
    found, values = parse(spec)
    chosen = {**values, **given}
    try:
        drafter = found.drafter(**_spelled(chosen))
    except ValueError as error:
        raise UnknownMethod(f"{found.name}: {error}") from error
    judge = _acceptors[found.acceptor]
    wanted = {option.name for option in options_of(judge)}
    known = {option.name: option.default for option in found.options} | chosen
    return Method(
        name=found.name,
        drafter=drafter,
        acceptor=judge(**_spelled({name: known[name] for name in known if name in wanted})),
        exactness=found.exactness,
        exact_to=found.exact_to,
        spec=spec,
    )
