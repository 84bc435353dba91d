"""Reading and checking request bodies: strict JSON, and errors that name the field and what was meant.

`StrictJSONRoute` reads the body of a route. `to_api_error` turns what pydantic found into one error in
plain words; it needs the body's model to tell fields from the names that pydantic gives to the members
of a union, and to suggest the field that a misspelt one resembles.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from outstride.serve.settings import APIError, invalid

Body = TypeVar("Body", bound=BaseModel)
_LONGEST = 200
"""Characters of a field's path that an error repeats."""
_WORDING = (
    (r"^(Input|List|String|Value|Dictionary|Data) should ", "must "),
    (r"^must be a valid ", "must be a "),
    (r"^must be a integer", "must be an integer"),
    (r"^must be a boolean", "must be true or false"),
    (r"^must be a dictionary.*", "must be an object"),
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r" after validation", ""),
)
"""pydantic's wording, and ours."""


# --- reading ----------------------------------------------------------------------------------------


class _StrictJSONRequest(Request):
    """A request whose body is JSON as the standard has it: UTF-8, without NaN and Infinity."""

    async def json(self) -> Any:
        return parse_json(await self.body())


class StrictJSONRoute(APIRoute):
    """A route that refuses bodies that are not declared as JSON, and explains those that are wrong.

    The content type must be declared for safety, too: a page of a stranger can make a browser send
    text to this server without a preflight, but not JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()
        model = get_type_hints(self.endpoint).get("body")
        if model is None:
            return inner

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                raise APIError(
                    415, "the body must be JSON: send the header 'content-type: application/json'"
                )
            try:
                return await inner(_StrictJSONRequest(request.scope, request.receive))
            except RequestValidationError as error:
                raise to_api_error(error.errors(), model) from error

        return handle


def parse_json(data: bytes) -> Any:
    """The value of a body; raises `APIError` that says where it is not JSON."""
    suspect = False

    def number(text: str) -> float:
        nonlocal suspect
        value = float(text)
        suspect = suspect or not math.isfinite(value)
        return value

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=number, parse_float=number)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 text: see byte {error.start}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise invalid(f"the body is not valid JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise invalid("the body holds a number that is too long") from error
    if suspect and (found := _non_finite(value, ())) is not None:
        path, number_found = found
        name = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(number_found, "NaN")
        place = _joined(path)
        raise invalid(f"{place} is {name}; numbers must be finite", place)
    return value


def _non_finite(
    value: Any, path: tuple[str | int, ...]
) -> tuple[tuple[str | int, ...], float] | None:
    """The first number that is not finite, and where it stands."""
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, value)
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        if (found := _non_finite(item, (*path, key))) is not None:
            return found
    return None


# --- explaining -------------------------------------------------------------------------------------


def validated(model: type[Body], values: Mapping[str, Any]) -> Body:
    """A body from values that came by another way than a route; raises `APIError`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise to_api_error(error.errors(), model) from error


def to_api_error(errors: Sequence[Any], model: type[BaseModel]) -> APIError:
    """The first of pydantic's errors in plain words, with its field as `param`."""
    first = errors[0]
    unknown = first["type"] == "extra_forbidden"
    path, siblings = _field_path(first["loc"], model, unknown=unknown)
    place = _joined(path)
    if unknown:
        near = difflib.get_close_matches(str(path[-1]), sorted(siblings), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return invalid(f"unknown field '{place}'{hint}", place)
    if not path:
        if first["type"] == "missing":
            return invalid("the body is empty: send a JSON object")
        return invalid("the body must be a JSON object")
    if first["type"] == "missing":
        return invalid(f"{place} is missing", place)
    # A union reports one error per member: those that go deepest together say what the field takes.
    paths = [_field_path(error["loc"], model)[0] for error in errors]
    path = max((found for found in paths if found[: len(path)] == path), key=len)
    same = [error["msg"] for error, found in zip(errors, paths, strict=True) if found == path]
    place = _joined(path)
    return invalid(f"{place} {_reworded(same)}", place)


def _reworded(messages: Sequence[str]) -> str:
    found: list[str] = []
    for text in messages:
        for pattern, plain in _WORDING:
            text = re.sub(pattern, plain, text)
        if text not in found:
            found.append(text)
    first, *more = found
    if not first.startswith("must be "):
        return first if first.startswith("must ") else f"is wrong: {first}"
    others = [text.removeprefix("must be ") for text in more if text.startswith("must be ")]
    return " or ".join([first, *others])


def _joined(path: Sequence[str | int]) -> str:
    text = ".".join(map(str, path))
    return text.encode("utf-8", "replace").decode()[:_LONGEST]


def _field_path(
    location: Sequence[str | int], model: type[BaseModel], *, unknown: bool = False
) -> tuple[list[str | int], set[str]]:
    """A location without pydantic's names for members of unions, and the fields next to its last.

    unknown: the last part is a field that the model does not have.
    """
    path: list[str | int] = []
    types: list[Any] = [model]
    siblings: set[str] = set()
    rest = list(location)
    if rest[:1] == ["body"]:
        rest = rest[1:]
    for at, part in enumerate(rest):
        models = [t for t in types if isinstance(t, type) and issubclass(t, BaseModel)]
        fields: dict[str, Any] = {}
        for found in models:
            fields |= {f.alias or n: f.annotation for n, f in found.model_fields.items()}
        if isinstance(part, int):
            inner = [a for t in types if get_origin(t) is list for a in get_args(t)]
        elif part in fields:
            siblings, inner = set(fields), [fields[part]]
        elif any(get_origin(t) is dict for t in types):
            inner = []
        elif unknown and at == len(rest) - 1:
            siblings, inner = set(fields), []
        else:
            continue
        path.append(part)
        types = [member for t in inner for member in _members(t)]
    return path, siblings


def _members(annotation: Any) -> list[Any]:
    """The types that a field takes: members of unions, without what annotations add."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return [found for member in get_args(annotation) for found in _members(member)]
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    return [annotation]
