"""A wheel holds every file that the package reads at run time; a source distribution can build it.

Nothing is compiled here: `make wheel` builds a wheel and runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "outstride"
SOURCES = {".cpp", ".inc", ".h"}
"""Compiled into the wheel's native modules, and needed to build it from a source distribution."""
IGNORED = {".so", ".pyc"}

OUTPUTS = """
import json, os
from setuptools.dist import Distribution
made = Distribution({"script_name": "setup.py"})
made.parse_config_files()
command = made.get_command_obj("build_py")
command.ensure_finalized()
found = command.get_outputs(include_bytecode=False)
print(json.dumps([os.path.relpath(path, command.build_lib) for path in found]))
"""


def in_tree() -> set[str]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    return {str(p.relative_to(PACKAGE.parent)) for p in files if p.suffix not in IGNORED}


def python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_holds_every_file_but_the_c_sources() -> None:
    found = set(json.loads(python("-c", OUTPUTS).splitlines()[-1]))
    expected = {name for name in in_tree() if Path(name).suffix not in SOURCES}
    assert found == expected
    for name in ("py.typed", "serve/page/index.html", "bench/data/prompts.jsonl"):
        assert f"outstride/{name}" in found
    for name in ("shipped/draft_heads/smollm2-block-drafter", "shipped/parallel-full"):
        assert f"outstride/models/{name}/model.safetensors" in found


def test_a_source_distribution_can_be_built(tmp_path: Path) -> None:
    base = ("setup.py", "-q", "egg_info", "--egg-base", str(tmp_path))
    python(*base, "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        found = {name.split("/", 1)[-1] for name in file.getnames()}
    assert {f"src/{name}" for name in in_tree()} <= found
    assert {"setup.py", "pyproject.toml", "constraints.txt", "Makefile", "LICENSE"} <= found
    assert not [name for name in found if name.endswith((".so", ".pyc"))]


def test_setup_depends_on_every_source_of_the_kernels() -> None:
    setup = (ROOT / "setup.py").read_text()
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in SOURCES]
    missing = [p.name for p in sources if str(p.relative_to(ROOT)) not in setup]
    assert not missing, f"setup.py does not name {missing}: a change would not rebuild the kernels"


@pytest.mark.parametrize("name", ["wheel", "sanitize"])
def test_make_help_names_the_targets(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"'make {name} " in makefile
    assert f"\n{name}: " in makefile
