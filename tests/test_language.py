"""One vocabulary: the field's words everywhere, no retired ones, and a complete glossary.

Identifiers, file names, command-line options, method options, metrics and headings are split into words
and compared with `RETIRED`. Prose is searched only for `RETIRED_PROSE`: words that have no second,
ordinary meaning in this project.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from outstride import registry
from outstride.cli.app import parser
from tests.source_tree import parsed

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "outstride"

RETIRED = {
    "asleep": "draft_backoff_until",
    "blame": "to_http_error",
    "card": "GPU, device",
    "cards": "GPUs, devices",
    "chance": "probability, rate",
    "chances": "probabilities, rates",
    "clerk": "request parser",
    "companies": "batch contexts",
    "company": "batch, num_running",
    "crowd": "batch, concurrency",
    "dawdle": "be slow",
    "dawdling": "slow",
    "errand": "task",
    "foreseen": "predicted, launched ahead",
    "foresight": "run-ahead",
    "graft": "draft head",
    "grafted": "attached draft head",
    "grafts": "draft heads",
    "hopeless": "failed_permanently",
    "lawful": "allowed",
    "mould": "metadata template",
    "moulds": "metadata templates",
    "odds": "acceptance estimate",
    "painted": "stream_canvas",
    "patience": "what it limits, with its unit",
    "patient": "what it limits",
    "promise": "expected acceptance, prior",
    "promises": "calibration",
    "rivals": "candidates, siblings",
    "relay": "overlapped draft and verify",
    "relays": "overlapped drafts",
    "roster": "sequence manager",
    "softened": "softmax",
    "spoke": "first_token_time",
    "stir": "Hadamard rotation",
    "stirred": "rotated",
    "swift": "device chain",
    "swiftly": "on the device",
    "talker": "decoding request",
    "talkers": "decoding requests",
    "talking": "decoding",
    "ticket": "request handle",
    "unborn": "pending_forks",
    "unread": "uncomputed",
    "warmth": "temperature",
    "whoever": "the request, the caller",
}
"""Word -> what the field says."""
RETIRED_IDENTIFIERS = {"least": "min_", "most": "max_", "LEAST": "MIN_", "MOST": "MAX_"}
"""Retired as whole identifiers only: `at_least` is English."""
BUILT_IN = {"Promise"}
"""Names of JavaScript."""
RETIRED_PROSE = re.compile(
    r"\b(graft(s|ed|ing)?|talkers?|stir(s|red|ring)?|moulds?|foresight|foreseen|relay(s|ed)?|clerks?|warmth"
    r"|softened|whoever|swift(ly)?|crowds?|errands?|dawdl\w+|in company"
    r"|(the|a|on|for|large|several) cards?|trained parts?|so many (rows|steps|nodes|tokens))\b",
    re.IGNORECASE,
)
FIELD_TERMS = (
    "speculative decoding",
    "KV cache",
    "prefill",
    "acceptance rate",
    "hidden states",
    "CUDA graph",
)
EXEMPT = {"tests/test_language.py", "docs/results", "src/outstride/bench/data", "LICENSE"}
"""This list itself, stored measurements, and other people's texts."""


def tracked(*endings: str) -> list[Path]:
    """Files of the project by the ends of their names."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    names = [name for name in listed if name] or [
        str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()
    ]
    return [
        ROOT / name
        for name in names
        if name.endswith(endings)
        and (ROOT / name).exists()
        and not any(name.startswith(exempt) for exempt in EXEMPT)
    ]


def parts(identifier: str) -> list[str]:
    """The words of an identifier: of `snake_case`, `CamelCase` and `kebab-case`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", identifier)
    return [word.lower() for word in re.split(r"[\W_\s]+", spaced) if word]


def retired(identifier: str) -> str | None:
    """What to say instead, or None if the identifier is fine."""
    if identifier in BUILT_IN:
        return None
    if identifier in RETIRED_IDENTIFIERS:
        return RETIRED_IDENTIFIERS[identifier]
    for word in parts(identifier):
        if word in RETIRED:
            return RETIRED[word]
    return None


def python_identifiers(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments and strings, docstrings among them."""
    literals = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in literals:
            for i, line in enumerate(token.string.splitlines()):
                yield token.start[0] + i, line


def native_identifiers(text: str) -> Iterator[tuple[int, str]]:
    """Words of C++, JavaScript, CSS and HTML outside comments and strings."""
    for i, line in enumerate(text.splitlines(), 1):
        for word in re.findall(
            r"[A-Za-z_][\w-]*", re.sub(r'//.*|/\*.*?\*/|<!--.*?-->|"[^"]*"', "", line)
        ):
            yield i, word


def found_in(pairs: Iterable[tuple[int, str]]) -> list[str]:
    """Retired identifiers, with their lines and what to say instead."""
    return [
        f"{line}: {name} (say: {instead})" for line, name in pairs if (instead := retired(name))
    ]


def report(path: Path, lines: list[str]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}" for line in lines]


def test_identifiers_are_the_fields() -> None:
    found: list[str] = []
    for path in tracked(".py"):
        found += report(path, found_in(python_identifiers(path.read_text())))
    for path in tracked(".cpp", ".h", ".inc", ".js", ".css", ".html"):
        found += report(path, found_in(native_identifiers(path.read_text())))
    assert not found, "\n".join(found)


def test_file_names_are_the_fields() -> None:
    names = [path.relative_to(ROOT) for path in tracked("")]
    found = [str(name) for name in names for part in name.parts if retired(Path(part).stem)]
    assert not found, "\n".join(found)


def options(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield name
                yield from options(below)


def test_options_are_the_fields() -> None:
    registry.discover()
    names = {option.name for entry in registry.entries() for option in entry.options}
    found = sorted(name for name in {*options(parser()), *names} if retired(name.strip("-")))
    assert not found


def test_metrics_are_the_fields() -> None:
    text = (SOURCE / "serve" / "metrics.py").read_text()
    names = re.findall(r"\"(outstride_\w+|\w+_(?:total|seconds|ratio|bytes))\"", text)
    assert names
    assert not [name for name in names if retired(name)]


def test_headings_are_the_fields() -> None:
    found = []
    for path in tracked(".md"):
        for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
            found += [f"{path.name}: {heading}" for word in parts(heading) if word in RETIRED]
    assert not found, "\n".join(found)


def test_prose_is_the_fields() -> None:
    found: list[str] = []
    for path in tracked(".py"):
        lines = [
            f"{i}: {line.strip()[:90]}" for i, line in python_prose(path.read_text()) if bad(line)
        ]
        found += report(path, lines)
    for path in tracked(".md", ".cpp", ".h", ".inc", ".js", ".css", ".html", "Makefile", ".toml"):
        rows = enumerate(path.read_text().splitlines(), 1)
        found += report(path, [f"{i}: {line.strip()[:90]}" for i, line in rows if bad(line)])
    assert not found, "\n".join(found)


def bad(line: str) -> bool:
    return RETIRED_PROSE.search(line) is not None


def test_the_checks_find_what_they_look_for() -> None:
    """Planted faults: each must be reported."""
    code = "class GraftWeights:\n    unread = 1\n\ndef f(least):\n    return on_card\n"
    assert len(found_in(python_identifiers(code))) == 4
    assert found_in(native_identifiers("int talkers = 0;  // fine"))
    assert [line for line in ("# whoever reads", '"""The card."""') if bad(line)]
    assert not found_in(python_identifiers("at_least = discard = wildcard = 'graft'"))
    assert not bad("The request is prefilled in chunks; discard the rest.")


@pytest.mark.parametrize("term", FIELD_TERMS)
def test_the_fields_terms_are_used(term: str) -> None:
    """A search for a term finds it: in the documentation and where the code does it."""
    pattern = re.compile(re.escape(term).replace(r"\ ", r"\s+"), re.IGNORECASE)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert any(pattern.search(page.read_text()) for page in pages)
    assert any(pattern.search(path.read_text()) for path in SOURCE.rglob("*.py"))


# --- one name, one meaning -----------------------------------------------------------------------


def public_classes() -> dict[str, list[Path]]:
    """Public classes of the package at module level, and where each name is defined."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(SOURCE))
    return found


def test_no_public_class_name_is_used_twice() -> None:
    doubled = {name: paths for name, paths in public_classes().items() if len(paths) > 1}
    assert not doubled


def glossary() -> str:
    return (ROOT / "docs" / "glossary.md").read_text()


def test_the_glossary_has_every_public_class() -> None:
    text = glossary()
    assert not [name for name in public_classes() if f"`{name}`" not in text]


def contract_words() -> Iterator[str]:
    """Public members of the contracts: what a drafter, an acceptor, a model and a backend must know."""
    for name in ("core/contracts.py", "core/proposal.py", "core/view.py"):
        for node in parsed(SOURCE / name).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            for member in node.body:
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    yield member.target.id
                elif isinstance(member, ast.FunctionDef):
                    yield member.name


def test_the_glossary_has_every_word_of_the_contracts() -> None:
    text = glossary()
    missing = {w for w in contract_words() if not w.startswith("_") and f"`{w}`" not in text}
    assert not missing, sorted(missing)
