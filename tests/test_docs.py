"""The documentation says what is the case: tables, links, examples and command lines are checked.

`python tests/test_docs.py` writes the generated pages anew: methods with their papers, commands,
the families of models, and the classes of the glossary.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outstride import registry
from outstride.cli.app import main, parser
from tests.models.families_table import models_page
from tests.source_tree import parsed

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GLOSSARY = ROOT / "docs" / "glossary.md"
CLASSES = "<!-- classes: written by tests/test_docs.py from docstrings -->"
FIGURES = ROOT / "docs" / "figures.json"
AGAIN = "run: python tests/test_docs.py"


# --- reading pages ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark` is what a comment `<!-- run: mark -->` just before it says."""

    page: Path
    line: int
    language: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


FENCE = re.compile(
    r"(?:^<!-- run: (?P<mark>[\w-]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks() -> list[Block]:
    """All fenced blocks of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("text")) + 1
            found.append(Block(page, line, match["language"], match["text"], match["mark"]))
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


# --- the table of methods -----------------------------------------------------------------------


def method_table() -> str:
    """The methods of the package, as Markdown."""
    registry.discover()
    lines = ["| method | what it does | exactness | needs | options |", "|---|---|---|---|---|"]
    for entry in registry.entries():
        if not entry.drafter.__module__.startswith("outstride."):
            continue
        options = ", ".join(
            f"`{o.name}`" if o.required else f"`{o.name}={o.default}`" for o in entry.options
        )
        needs = ", ".join(entry.needs) or "nothing"
        exactness = entry.exactness.value
        if entry.exact_to != "plain":
            exactness += f" to `{entry.exact_to}`"
        row = (f"`{entry.name}`", entry.summary, exactness, needs, options or "none")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines)


# --- the page of methods and papers --------------------------------------------------------------

HEAD = """# Methods

<!-- written by tests/test_docs.py from the methods' docstrings and docs/figures.json -->

A method is written `name` or `name:key=value,key=value`, in Python, on the command line and in requests
to the server. `outstride methods auto` shows one of them in full.

*exact*: the same tokens as plain decoding. *exact to* another method: the same tokens as that one.
*distribution*: other tokens from the same distribution. *lossy*: the text may change; such a method is
never chosen for you. [Exactness](exactness.md) explains why sampled text can be exact at all.

"""
PAPERS = """

## Papers and figures

Papers report speed-ups of their own models on their own machines against their own baselines. The
figures are from their abstracts, unless marked as not looked up. Ours are for the default model, or for
the two small masked models in the package, with the command that prints them. The last column says why
the two differ.

"""


def outside(text: str) -> str:
    return text.replace("|", "\\|")


def methods_page() -> str:
    """Every method by family, with its paper, the paper's figure, ours, and why they differ."""
    registry.discover()
    figures = json.loads(FIGURES.read_text())
    families: dict[str, list[registry.MethodEntry]] = {}
    for entry in registry.entries():
        if entry.drafter.__module__.startswith("outstride."):
            families.setdefault(entry.family, []).append(entry)
    parts = []
    for family in sorted(families):
        lines = [
            f"### {family.capitalize()}\n",
            "| method | paper | the paper says | here | why they differ |",
            "|---|---|---|---|---|",
        ]
        for entry in families[family]:
            if entry.name not in figures:
                raise SystemExit(
                    f"docs/figures.json lacks {entry.name}: what its paper says, and why"
                )
            known = figures[entry.name]
            ours = known.get("ours", "not measured")
            cells = (f"`{entry.name}`", entry.paper, known["paper"], ours, known["why"])
            lines.append("| " + " | ".join(map(outside, cells)) + " |")
        parts.append("\n".join(lines))
    return HEAD + method_table() + PAPERS + "\n\n".join(parts) + "\n"


def test_every_method_stands_beside_its_paper() -> None:
    registry.discover()
    own = {e.name for e in registry.entries() if e.drafter.__module__.startswith("outstride.")}
    figures = json.loads(FIGURES.read_text())
    assert set(figures) == own, "docs/figures.json has one entry for each method"
    for name, known in figures.items():
        assert set(known) <= {"paper", "ours", "why"}, name
        assert known["paper"], name
        assert known["why"], name
    assert (ROOT / "docs" / "methods.md").read_text() == methods_page(), AGAIN


def test_a_figure_names_its_command_or_the_log() -> None:
    for name, known in json.loads(FIGURES.read_text()).items():
        ours = known.get("ours", "")
        said = re.search(r"`outstride [^`]+`|\[(log|training)\]|by definition", ours)
        assert not ours or said, name


# --- the page of commands ------------------------------------------------------------------------

COMMANDS_HEAD = """# Commands

<!-- written by tests/test_docs.py from the command line itself -->

What `--help` says, in one place. All commands take `--help`; `outstride --version` names the version.
`OUTSTRIDE_DEBUG=1` in the environment shows the traceback of an error.
"""


def subcommands(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command and all below it that do something."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for word, below in action.choices.items():
            yield from subcommands(below, f"{name} {word}")


def written(action: argparse.Action) -> str:
    """An argument as one types it."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = ""
    if action.nargs != 0:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        value = " " + (str(action.metavar or "") or choices or action.dest.upper())
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def commands_page() -> str:
    """Every command with its arguments."""
    parts = [COMMANDS_HEAD]
    for name, command in subcommands(parser(), "outstride"):
        parts.append(f"## {name}\n\n{' '.join((command.description or '').split())}\n")
        shown = [a for a in command._actions if not isinstance(a, argparse._HelpAction)]
        if shown:
            lines = ["| argument | what it does |", "|---|---|"]
            for action in shown:
                text = command._get_formatter()._expand_help(action) if action.help else ""
                lines.append(f"| {outside(written(action))} | {outside(' '.join(text.split()))} |")
            parts.append("\n".join(lines) + "\n")
        if command.epilog:
            parts.append(" ".join(command.epilog.split()) + "\n")
    return "\n".join(parts)


def test_every_option_is_documented() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == commands_page(), AGAIN


def test_every_option_says_what_it_does() -> None:
    for name, command in subcommands(parser(), "outstride"):
        assert command.description, f"{name} has no description"
        for action in command._actions:
            assert action.help, f"{name}: {written(action)} has no help"


# --- the classes of the glossary -----------------------------------------------------------------


def first_sentence(node: ast.ClassDef) -> str:
    """The first sentence of a class docstring, on one line."""
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", text)[0]


def class_table() -> str:
    """Every public class of the package with the first sentence of its docstring, by package."""
    source = ROOT / "src" / "outstride"
    packages: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        package = place.parts[0] if len(place.parts) > 1 else "outstride"
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                row = f"| `{node.name}` | {outside(first_sentence(node))} | `{place}` |"
                packages.setdefault(package, []).append(row)
    parts = []
    for package in sorted(packages):
        head = f"### {package}\n\n| class | what it is | file |\n|---|---|---|\n"
        parts.append(head + "\n".join(sorted(packages[package])))
    return "\n\n".join(parts)


def glossary_page() -> str:
    """The glossary: its words are written by hand, its classes come from the code."""
    return f"{GLOSSARY.read_text().partition(CLASSES)[0]}{CLASSES}\n\n{class_table()}\n"


def test_the_glossary_lists_the_classes() -> None:
    assert GLOSSARY.read_text() == glossary_page(), AGAIN


# --- the families of models ----------------------------------------------------------------------


def test_the_table_of_families_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == models_page(), AGAIN


# --- the generated pages, anew -------------------------------------------------------------------

GENERATED: dict[str, Callable[[], str]] = {
    "docs/glossary.md": glossary_page,
    "docs/methods.md": methods_page,
    "docs/commands.md": commands_page,
    "docs/models.md": models_page,
}


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        if re.match(r"https://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_relative_to(ROOT), f"{target} leads out of the project"
        assert path.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(path), f"{target}: no such heading"


def test_every_page_of_the_documentation_can_be_found() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, f"{page.name} is not listed"


# --- examples -----------------------------------------------------------------------------------

PYTHON = [block for block in blocks() if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_examples_compile(block: Block) -> None:
    compile(block.text, str(block), "exec")


def run_marked(mark: str, folder: Path) -> None:
    """Runs the blocks of one mark as one program, in a process of its own."""
    marked = [block for block in PYTHON if block.mark == mark]
    assert marked, f"no example is marked {mark}"
    program = folder / f"{mark}.py"
    program.write_text("\n\n".join(block.text for block in marked))
    command = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_the_worked_example_of_a_method_holds(tmp_path: Path) -> None:
    run_marked("successor", tmp_path)


def test_the_examples_of_masked_models_run(tmp_path: Path) -> None:
    run_marked("diffusion", tmp_path)


@pytest.mark.model
def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    run_marked("readme", tmp_path)


def test_marks_are_known() -> None:
    run = {"readme", "successor", "diffusion", "client"}  # tests/serve runs the client's
    assert {block.mark for block in blocks()} == {None, *run}


def test_every_python_example_runs() -> None:
    assert not [str(block) for block in PYTHON if block.mark is None]


# --- command lines ------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """Where a command line stands, and its text: in blocks line by line, in prose in backticks."""
    for block in blocks():
        if block.language in ("", "sh", "bash", "console"):
            for i, line in enumerate(block.text.splitlines()):
                yield f"{block.page.relative_to(ROOT)}:{block.line + i}", line
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            yield str(page.relative_to(ROOT)), code


def matching(program: str) -> list[tuple[str, list[str]]]:
    """Command lines that call a program, without prompts, comments and trailing ellipses."""
    found = []
    for where, line in commands():
        line = re.sub(r"^\$ ", "", line.strip()).removeprefix(".venv/bin/")
        if line == program or line.startswith(program + " "):
            words = shlex.split(line, comments=True)[1:]
            found.append((where, words))
    return found


NAMES = {name for name, _ in subcommands(parser(), "outstride")}


@pytest.mark.parametrize(("where", "words"), matching("outstride"))
def test_command_lines_parse(where: str, words: list[str]) -> None:
    if " ".join(["outstride", *words]) in NAMES:
        return  # a command's name, in a sentence
    try:
        parser().parse_args(words)
    except SystemExit as stop:
        if stop.code:
            pytest.fail(f"{where}: outstride {shlex.join(words)}")


QUICK: dict[str, list[str]] = {
    "run": ["--max-tokens", "4"],
    "prove": ["--limit", "2", "--max-tokens", "4"],
    "bench decode": ["--limit", "2", "--max-tokens", "4", "--min-tokens", "0"],
    "bench step": ["--nodes", "1,2", "--cached", "8", "--lengths", "0", "--repeat", "1"],
    "methods": [],
    "models": [],
}
"""Commands that can be run on the toy model, and what makes them quick there: of an option that is
given twice, the last one counts. All others take minutes, a GPU, a server or real weights; they are
parsed here, and have tests of their own."""


def runnable() -> list[list[str]]:
    """The different command lines of all pages that can be run on the toy model."""
    found: dict[str, list[str]] = {}
    for _, words in matching("outstride"):
        name = " ".join(words[: 2 if words[:1] == ["bench"] else 1])
        outside = {"cuda", "llama.cpp", "transformers"} & set(words)
        if name in QUICK and not outside:
            mention = " ".join(["outstride", *words]) in NAMES and name in ("run", "prove")
            if not mention and "…" not in "".join(words):
                found[" ".join(words)] = words
    return list(found.values())


@pytest.mark.parametrize("words", runnable(), ids=" ".join)
def test_quick_commands_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command line of the documentation on a model that takes microseconds."""
    from tests.bench import fake  # not there for the script

    (tmp_path / "question.jsonl").write_text(
        '{"question_id": 1, "category": "qa", "turns": ["one two one two"]}\n' * 2
    )
    (tmp_path / "prompts.txt").write_text("one two one two\nthree\n")
    monkeypatch.chdir(tmp_path)
    name = " ".join(words[: 2 if words[0] == "bench" else 1])
    if any("model=" in word for word in words):
        pytest.skip("needs a second model")
    code = main([*words, *QUICK[name]], context=fake.context(context=1024, pages=1024))
    assert code == 0


def test_quick_commands_are_commands() -> None:
    assert {f"outstride {name}" for name in QUICK} <= NAMES


@pytest.mark.parametrize(("where", "words"), matching("make"))
def test_make_targets_exist(where: str, words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets, f"{where}: make {word}"


@pytest.mark.parametrize(("where", "words"), [*matching("python"), *matching("pytest")])
def test_scripts_exist(where: str, words: list[str]) -> None:
    for word in words:
        assert not word.endswith(".py") or (ROOT / word).exists(), f"{where}: {word}"


if __name__ == "__main__":
    for name, made in GENERATED.items():
        (ROOT / name).write_text(made())
