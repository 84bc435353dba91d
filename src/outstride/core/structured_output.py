"""`OutputFormat`: the structured output that a request asks for. `outstride.grammar` compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("json_schema", "json_object", "regex", "ebnf", "lark")
"""The kinds of formats; EBNF is the notation of GBNF files (`root ::= …`)."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A kind of format, and its schema, expression or grammar."""

    kind: str
    text: str = ""

    @classmethod
    def schema(cls, schema: Mapping[str, Any]) -> OutputFormat:
        """JSON that is valid under a JSON schema."""
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def regex(cls, text: str) -> OutputFormat:
        """Text that a regular expression matches from its beginning to its end."""
        return cls("regex", text)

    @classmethod
    def ebnf(cls, text: str) -> OutputFormat:
        """Text that can be derived from `root`."""
        return cls("ebnf", text)


JSON = OutputFormat("json_object")
"""Any JSON object."""
