"""Structured output: the fields of a body become an output format, which the engine compiles.

Nothing is compiled here: a large schema takes long, and the HTTP process has to answer other clients
meanwhile. The engine process compiles on threads of its own, and a grammar that it refuses is a 400.
"""

from __future__ import annotations

import json
from typing import Any

from outstride.core.structured_output import JSON, OutputFormat
from outstride.serve.protocol import ResponseFormat, SamplingBody, StructuredOutputs
from outstride.serve.settings import invalid


def output_format(body: SamplingBody, max_bytes: int) -> tuple[OutputFormat | None, str]:
    """What a body asks for in one of several ways, None for plain text; and the field that does."""
    found = {name: shape for name, shape in _requested(body).items() if shape is not None}
    if len(found) > 1:
        names = " and ".join(found)
        raise invalid(f"{names} exclude each other", list(found)[-1])
    for name, shape in found.items():
        return check_size(shape, name, max_bytes), name
    return None, ""


def check_size(shape: OutputFormat, param: str, max_bytes: int) -> OutputFormat:
    """The format, unless it is too long."""
    if len(shape.text) > max_bytes:
        raise invalid(f"a schema or grammar may have {max_bytes} bytes", param)
    return shape


def _requested(body: SamplingBody) -> dict[str, OutputFormat | None]:
    """The formats that a body names, by field."""
    given = body.structured_outputs
    return {
        "response_format": _response_format(body.response_format),
        "structured_outputs": None if given is None else _structured(given),
        "guided_json": _schema(body.guided_json, "guided_json"),
        "guided_regex": _text("regex", body.guided_regex, "guided_regex"),
        "guided_choice": _choice(body.guided_choice, "guided_choice"),
        "guided_grammar": _grammar(body.guided_grammar, "guided_grammar"),
    }


def _response_format(wanted: ResponseFormat | None) -> OutputFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JSON
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise invalid("response_format lacks json_schema.schema", "response_format")
        return OutputFormat("json_schema", json.dumps(wanted.json_schema.schema_))
    field = "regex" if wanted.type == "regex" else "grammar"
    text = getattr(wanted, field)
    if not text:
        raise invalid(f"response_format of type {wanted.type} lacks {field}", "response_format")
    return OutputFormat(wanted.type, text)


def _structured(wanted: StructuredOutputs) -> OutputFormat:
    """vLLM's `structured_outputs`: exactly one of its fields."""
    field = "structured_outputs"
    found = [
        shape
        for shape in (
            _schema(wanted.json_, field),
            _text("regex", wanted.regex, field),
            _choice(wanted.choice, field),
            _grammar(wanted.grammar, field),
            JSON if wanted.json_object else None,
            _structural_tag(wanted.structural_tag, field),
        )
        if shape is not None
    ]
    if len(found) != 1:
        raise invalid(
            "structured_outputs needs one of json, regex, choice, grammar, json_object and "
            f"structural_tag; {len(found)} are set",
            field,
        )
    return found[0]


def _schema(wanted: Any, field: str) -> OutputFormat | None:
    """A JSON schema, as an object or as text."""
    if wanted is None:
        return None
    if isinstance(wanted, str):
        try:
            wanted = json.loads(wanted)
        except (ValueError, RecursionError) as error:
            raise invalid(
                f"{field} holds a JSON schema that is not valid JSON: {error}", field
            ) from error
    if not isinstance(wanted, dict | bool):
        raise invalid(f"{field} must hold a JSON schema", field)
    return OutputFormat("json_schema", json.dumps(wanted))


def _text(kind: str, wanted: str | None, field: str) -> OutputFormat | None:
    if wanted is None:
        return None
    if not wanted:
        raise invalid(f"{field} is empty", field)
    return OutputFormat(kind, wanted)


def _choice(wanted: list[str] | None, field: str) -> OutputFormat | None:
    """One of several texts."""
    if wanted is None:
        return None
    if not wanted or not all(wanted):
        raise invalid(f"{field} needs texts to choose from, none of them empty", field)
    return OutputFormat("lark", "start: " + " | ".join(json.dumps(text) for text in wanted))


def _grammar(wanted: str | None, field: str) -> OutputFormat | None:
    """EBNF (`root ::= …`), or else Lark."""
    return _text("ebnf" if "::=" in (wanted or "") else "lark", wanted, field)


def _structural_tag(wanted: str | dict[str, Any] | None, field: str) -> OutputFormat | None:
    """Free text in which a trigger begins a structure: `structures` with begin, schema and end."""
    if wanted is None:
        return None
    from outstride.grammar.matcher import structural_tags

    try:
        value = json.loads(wanted) if isinstance(wanted, str) else wanted
        triggers = value["triggers"]
        tags = [
            (
                next(trigger for trigger in triggers if tag["begin"].startswith(trigger)),
                *(tag["begin"], tag["schema"], tag["end"]),
            )
            for tag in value["structures"]
        ]
        return OutputFormat("lark", structural_tags(tags))
    except (
        ValueError,
        KeyError,
        TypeError,
        StopIteration,
        AttributeError,
        AssertionError,
    ) as error:
        raise invalid(
            "structural_tag needs triggers, and structures with begin, schema and end, where each "
            f"begin starts with a trigger ({error!r})",
            field,
        ) from error
