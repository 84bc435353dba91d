"""Imports point down only, and only to what is declared.

The rules are read off the syntax tree of every module, so imports inside functions, under
TYPE_CHECKING and by `importlib.import_module("…")` count like all others.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "outstride"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("serve", "bench", "train"),
    ("outstride",),  # the package's own front door
    ("llm",),
    ("results",),
    ("engine",),
    ("policy",),
    ("draft", "accept", "diffusion", "models", "cache", "grammar"),
    ("ops",),
    ("registry",),
    ("core",),
    ("errors",),
)
"""From the top. A layer may import itself and what lies below it; never a neighbour."""

OPTIONAL = {
    "triton": ("ops",),
    "llama_cpp": ("bench",),
    "transformers": ("bench", "models.bridge"),
}
"""Packages that a layer, or a package in it, may use where they are installed: torch for GPUs brings
the first, the others are peers to measure against; transformers is an extra as well."""
ONLY_FROM = {
    "registry": {
        *("policy", "draft", "accept", "diffusion"),
        *("llm", "outstride", "serve", "bench", "train", "cli"),
    },
    "config": {"draft", "accept", "llm", "outstride", "serve", "bench", "train", "cli"},
}
"""Layers that not everybody above them may import."""

MAY_USE = {"core": {"numpy"}, "grammar": {"numpy", "llguidance"}, "errors": set[str]()}
"""Layers that know only some of the dependencies."""
BANNED_NAMES = {"util", "utils"}

RANK = {layer: rank for rank, layers in enumerate(reversed(LAYERS)) for layer in layers}


def declared() -> set[str]:
    """Run-time dependencies, as they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = (re.match(r"[A-Za-z0-9_.-]+", line) for line in project["dependencies"])
    return {name[0].replace("-", "_").lower() for name in names if name}


def layer_of(module: str) -> str:
    """The layer of a dotted module name of this package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def modules(package: Path) -> dict[str, Path]:
    """All modules below a folder named `outstride`, by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported; a relative import starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"  # `from outstride import llm` imports a module
                yield node.lineno, inner if inner in known else base
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            target = node.args[0]
            if name in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def complaint(importer: str, imported: str, allowed: set[str]) -> str | None:
    """Why one import is against the rules, or None."""
    own = layer_of(importer)
    if imported.startswith("."):
        return "relative imports hide where they point"
    top = imported.split(".")[0]
    if top == "outstride":
        other = layer_of(imported)
        if other not in RANK:
            return f"{other} is in no layer"
        if other == own:
            return None
        if RANK[other] == RANK[own]:
            return f"{own} and {other} are neighbours"
        if RANK[other] > RANK[own]:
            return f"{other} lies above {own}"
        if own not in ONLY_FROM.get(other, {own}):
            return f"{other} is not for {own}"
        return None
    if top in sys.stdlib_module_names:
        return None
    inside = {".".join(importer.split(".")[1:size]) for size in (2, 3)}
    if top not in allowed and not inside.intersection(OPTIONAL.get(top, ())):
        return f"{top} is not a run-time dependency"
    if top not in MAY_USE.get(own, {top}):
        return f"{own} knows no {top}"
    return None


def violations(package: Path) -> list[str]:
    """Every breach of the rules below a folder named `outstride`."""
    found, known, allowed = [], modules(package), declared()
    for name, path in known.items():
        if banned := BANNED_NAMES.intersection(name.split(".")):
            found.append(f"{name}: a module called {banned.pop()} says nothing of what it holds")
        if layer_of(name) not in RANK:
            found.append(f"{name}: {layer_of(name)} is in no layer")
            continue
        for line, imported in imports(ast.parse(path.read_text()), set(known)):
            if reason := complaint(name, imported, allowed):
                found.append(f"{name}:{line}: imports {imported}: {reason}")
    return found


def test_imports_point_down() -> None:
    assert violations(PACKAGE) == []


def test_dependencies_are_the_chosen_few() -> None:
    assert declared() == {
        "fastapi",
        "gguf",
        "httptools",
        "huggingface_hub",
        "interegular",
        "jinja2",
        "llguidance",
        "numpy",
        "prometheus_client",
        "pydantic",
        "rich",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "uvicorn",
        "uvloop",
    }


def plant(root: Path, files: dict[str, str]) -> Path:
    """A package with these modules."""
    package = root / "outstride"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return package


HARMLESS = {
    "errors.py": "class Oops(Exception): ...\n",
    "core/graph.py": "import numpy as np\nfrom outstride.errors import Oops\n",
    "ops/reference.py": "import torch\nfrom outstride.core import graph\n",
    "registry.py": "import importlib\nfrom outstride.core.graph import np\n",
    "draft/plain.py": "from outstride.registry import importlib\n",
    "engine/engine.py": "import outstride.core.graph\nfrom outstride.cache import pool\n",
    "cache/pool.py": "from __future__ import annotations\nimport numpy.typing\n",
    "llm.py": "from outstride import registry\nfrom outstride.engine.engine import outstride\n",
    "__init__.py": "from outstride.llm import registry\n",
    "bench/step.py": "from outstride import registry\n",
    "models/bridge/open.py": "def f():\n    import transformers\n",
    "cli.py": "from outstride.bench import step\n",
}


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, HARMLESS)) == []


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        ("core/bad.py", "from outstride.engine.engine import x", "engine lies above core"),
        ("core/bad.py", "def f():\n    import torch", "core knows no torch"),
        ("core/bad.py", "from outstride import registry", "registry lies above core"),
        ("errors.py", "import numpy.linalg", "errors knows no numpy"),
        ("draft/bad.py", "from outstride.accept.match import x", "draft and accept are neighbours"),
        ("diffusion/bad.py", "import outstride.draft.plain", "diffusion and draft are neighbours"),
        ("models/bad.py", "import outstride.cache.pool", "models and cache are neighbours"),
        ("models/bad.py", "from outstride import registry", "registry is not for models"),
        ("bench/bad.py", "import outstride.serve.http", "bench and serve are neighbours"),
        ("engine/bad.py", "from outstride import llm", "llm lies above engine"),
        ("results.py", "from outstride.llm import x", "llm lies above results"),
        ("engine/bad.py", "from outstride import x", "outstride lies above engine"),
        ("llm.py", "from outstride.cli import main", "cli lies above llm"),
        (
            "engine/bad.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from outstride.llm import LLM",
            "llm lies above engine",
        ),
        ("models/bad.py", "import transformers", "transformers is not a run-time dependency"),
        (
            "models/bad.py",
            "import importlib\nimportlib.import_module('transformers')",
            "transformers is not a run-time dependency",
        ),
        ("cache/bad.py", "from . import pool", "relative imports"),
        ("core/utils.py", "", "says nothing of what it holds"),
        ("stray/thing.py", "", "stray is in no layer"),
        ("core/bad.py", "import outstride.stray.thing", "stray is in no layer"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, module: str, text: str, reason: str) -> None:
    found = violations(plant(tmp_path, {**HARMLESS, module: text}))
    assert found
    assert all(reason in line for line in found)
