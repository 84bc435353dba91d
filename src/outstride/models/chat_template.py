"""Chat templates: where a model's files have them, and their compilation in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from outstride.errors import CorruptModel

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates that have a meaning."""


def folder_templates(
    folder: Path, config: Mapping[str, Any], described: Mapping[str, Any]
) -> dict[str, str]:
    """The chat templates of a checkpoint folder by name; the plain one is called `default`.

    `chat_template.jinja` comes first, with named ones in `additional_chat_templates/`; then
    `tokenizer_config.json` (config), then `chat_template.json` (described).
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {**{file.stem: file for file in named}, DEFAULT: path}
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    stated = config.get("chat_template") or described.get("chat_template")
    return templates_of(stated)


def templates_of(stated: Any) -> dict[str, str]:
    """Templates by name from a single text, a list of entries or a mapping."""
    if isinstance(stated, str):
        return {DEFAULT: stated}
    if isinstance(stated, list):
        stated = {
            entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)
        }
    if not isinstance(stated, Mapping):
        return {}
    return {
        name: text
        for name, text in stated.items()
        if isinstance(name, str) and isinstance(text, str)
    }


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates in the metadata of a GGUF file by name; the plain one is called `default`."""
    key = "tokenizer.chat_template"
    found = {
        name.removeprefix(f"{key}."): text
        for name, text in metadata.items()
        if name.startswith(f"{key}.") and isinstance(text, str)
    }
    return {**found, **templates_of(metadata.get(key))}


def default_template(templates: Mapping[str, str]) -> str | None:
    """The template called `default`, or the first one."""
    return templates.get(DEFAULT) or next(iter(templates.values()), None)


@lru_cache(maxsize=16)
def compile_template(source: str) -> Any:
    """A chat template in a sandbox, with the helpers that templates expect."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Templates mark the assistant's part for training; here the mark means nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        options.setdefault("ensure_ascii", False)
        return json.dumps(value, **options)

    now: Callable[[str], str] = lambda pattern: datetime.now().strftime(pattern)  # noqa: E731
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise CorruptModel(f"the chat template cannot be read: {error}") from error
