"""The shape of an answer as a request states it: compiled elsewhere, by the library that knows how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("json_schema", "json_object", "regex", "ebnf", "lark")
"""What a shape can be written in; EBNF is that of GBNF files (`root ::= …`)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The kind, and the text that says it."""

    kind: str
    text: str = ""

    @classmethod
    def schema(cls, schema: Mapping[str, Any]) -> Shape:
        """Whatever fits a JSON schema."""
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def regex(cls, text: str) -> Shape:
        """Whatever a regular expression matches, from its beginning to its end."""
        return cls("regex", text)

    @classmethod
    def ebnf(cls, text: str) -> Shape:
        """Whatever can be derived from `root`."""
        return cls("ebnf", text)


JSON = Shape("json_object")
"""Any JSON object."""
