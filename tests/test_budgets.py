"""Budgets: sizes of files, functions and classes; the loop on one screen; a front page that is read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "outstride"
FILE_LINES, FUNCTION_LINES, CLASS_METHODS = 400, 60, 20
LOOP_LINES, README_LINES, CHANGELOG_LINES = 120, 130, 30


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(SOURCE)), path.read_text()


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it: kernels are unrolled by hand and exempt."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def long_functions(text: str) -> list[str]:
    return [
        f"{node.name}: {size} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not is_kernel(node)
        and (size := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    ]


def large_classes(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = [
                m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            if len(methods) > CLASS_METHODS:
                found.append(f"{node.name}: {len(methods)} methods")
    return found


def test_files_are_short() -> None:
    assert not [
        f"{name}: {lines} lines"
        for name, text in modules()
        if (lines := text.count("\n")) > FILE_LINES
    ]


def test_functions_are_short() -> None:
    assert not [f"{name}: {f}" for name, text in modules() for f in long_functions(text)]


def test_classes_are_small() -> None:
    assert not [f"{name}: {c}" for name, text in modules() for c in large_classes(text)]


def test_the_loop_is_one_screen() -> None:
    assert (SOURCE / "engine" / "engine.py").read_text().count("\n") <= LOOP_LINES


def test_the_front_page_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES
    assert (ROOT / "CHANGELOG.md").read_text().count("\n") <= CHANGELOG_LINES


def test_the_budgets_are_held() -> None:
    """Planted faults: each must be reported, and a kernel must not."""
    body = "    x = 1\n" * FUNCTION_LINES
    assert long_functions(f"def f():\n{body}")
    assert not long_functions(f"@triton.jit\ndef f():\n{body}")
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(CLASS_METHODS + 1))
    assert large_classes(f"class A:\n{methods}")
