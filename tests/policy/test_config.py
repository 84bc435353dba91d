"""Every field of `AutoConfig` is documented, in the class and in docs/auto.md."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from outstride.policy import config
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig

PAGE = Path(__file__).parents[2] / "docs" / "auto.md"


def test_the_table_of_the_docs_has_every_field_with_its_value() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [(name, value) for name, value, _ in rows] == [
        (field.name, str(field.default)) for field in fields(AutoConfig)
    ]


def test_every_field_has_a_sentence_and_the_docs_have_the_same() -> None:
    tree = ast.parse(inspect.getsource(config))
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    said = {}
    for field, after in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            said[field.target.id] = " ".join(str(after.value.value).split())
    rows = dict(re.findall(r"^\| `(\w+)` \| `[^`]+` \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == said
    assert all(text.endswith(".") for text in said.values())


def test_the_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        DEFAULT_CONFIG.backoff_after = 3  # type: ignore[misc]
