"""The documentation says what is the case: tables, links, examples and command lines are checked.

`python tests/test_docs.py` writes the table of methods into the README anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outstride import registry
from outstride.cli.app import parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = ROOT / "README.md"
BEGIN, END = "<!-- methods: written by tests/test_docs.py -->", "<!-- end of methods -->"


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


def with_table(text: str) -> str:
    """A page with the table of methods between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{method_table()}\n{END}{after}"


def test_the_readme_lists_the_methods() -> None:
    text = README.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert with_table(text) == text, "run: python tests/test_docs.py"


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


@pytest.mark.model
def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    run_marked("readme", tmp_path)


def test_marks_are_known() -> None:
    assert {block.mark for block in blocks()} == {None, "readme", "successor"}


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


@pytest.mark.parametrize(("where", "words"), matching("outstride"))
def test_command_lines_parse(where: str, words: list[str]) -> None:
    try:
        parser().parse_args(words)
    except SystemExit as stop:
        if stop.code:
            pytest.fail(f"{where}: outstride {shlex.join(words)}")


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
    README.write_text(with_table(README.read_text()))
