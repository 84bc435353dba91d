"""Builds of the native kernels: which there are, how one is chosen, and builds that this machine lacks.

Kernels for other processors are compiled into replay/replay.cpp, which repeats calls that the portable
build made here and compares every byte. ARM runs under qemu. AVX-VNNI runs with a stand-in for its one
instruction, and AMX with stand-ins for its tiles; test_cpu.py and its neighbours run them as they are,
on machines that have them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from outstride.errors import InvalidParams
from outstride.ops.cpu import Cpu, native
from tests.models.drive import random_decoder, tiny
from tests.ops.replay.cases import record

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)
ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
X86 = platform.machine() == "x86_64"


# --- which there are ---------------------------------------------------------------------------------


def test_every_machine_has_the_portable_build_and_it_is_the_slowest() -> None:
    isas = native.isas()
    assert isas[0] == native.ISAS.index("portable")
    assert list(isas) == sorted(set(isas))
    for isa in range(len(native.ISAS)):
        engine = native.library().outstride_open(1, isa, 1, 16, 64)
        assert (engine is not None) == (isa in isas)
        if engine is not None:
            native.library().outstride_close(engine)


def test_the_fastest_build_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTSTRIDE_ISA", raising=False)
    assert native.chosen_isa() == native.isas()[-1]


def test_the_environment_forces_any_build_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in native.isas():
        monkeypatch.setenv("OUTSTRIDE_ISA", native.ISAS[isa])
        ops = random_decoder(tiny(), pages=4, make_ops=Cpu.of).ops
        assert isinstance(ops, Cpu)
        assert ops.runtime.isa == isa
        assert ops.name.startswith(f"cpu {native.ISAS[isa]} ")


def test_a_build_that_is_not_here_is_an_error_that_lists_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = ", ".join(native.ISAS[isa] for isa in native.isas())
    absent = "neon-i8mm" if X86 else "amx"
    for name, why in (
        (absent, "this machine has no such build"),
        ("mmx", "there is no such build"),
    ):
        monkeypatch.setenv("OUTSTRIDE_ISA", name)
        with pytest.raises(InvalidParams, match=f"OUTSTRIDE_ISA={name}: {why}; .* {here}$"):
            Cpu.supports(tiny())


# --- builds for other processors ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "calls"
    calls = record(path)
    assert all(calls.values()), calls
    return path


def tool(*names: str) -> str:
    """The first of some programs that is installed; without any, the test is skipped."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"{' or '.join(names)} is not installed")
    return found


def compiled(compiler: str, folder: Path, *flags: str) -> Path:
    program = folder / "replay"
    source = ROOT / "tests" / "ops" / "replay" / "replay.cpp"
    subprocess.run(
        [compiler, *FLAGS, *flags, str(source), "-o", str(program), "-lpthread"], check=True
    )
    return program


def replayed(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The replay of AVX-VNNI and AMX for machines that have AVX2, or AVX-512 for the latter."""
    names = [native.ISAS[isa] for isa in native.isas()]
    if "avx2" not in names:
        pytest.skip("needs AVX2")
    kind = 1 if "avx512-vnni" in names else 2
    return compiled(
        tool(os.environ.get("CXX", "g++")),
        tmp_path_factory.mktemp("stand-ins"),
        f"-DOUTSTRIDE_AVX_VNNI_STAND_IN={kind}",
        "-DOUTSTRIDE_AMX_STAND_IN",
    )


def test_avx_vnni_with_a_stand_in_for_its_instruction(recording: Path, stand_ins: Path) -> None:
    """The stand-in is the same instruction of AVX-512, or a loop where the machine has only AVX2."""
    assert "avx-vnni: " in replayed(stand_ins, "avx-vnni", recording)


def test_amx_with_stand_ins_for_its_tiles(recording: Path, stand_ins: Path) -> None:
    if native.ISAS.index("avx512-vnni") not in native.isas():
        pytest.skip("needs AVX-512")
    assert "amx: " in replayed(stand_ins, "amx", recording)


def test_a_replay_notices_a_wrong_bit(recording: Path, stand_ins: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    data = bytearray(recording.read_bytes())
    data[-5] ^= 1  # what the last call must have written
    spoilt.write_bytes(data)
    failed = subprocess.run([stand_ins, "portable", spoilt], capture_output=True, text=True)
    assert failed.returncode == 1
    assert " 1 differences" in failed.stdout


@pytest.mark.skipif(not X86, reason="needs an x86 library")
def test_avx_vnni_is_encoded_without_avx512() -> None:
    """`vpdpbusd` on 256-bit registers with a VEX prefix: processors without AVX-512 know no other."""
    path = native.library_path()
    assert path is not None
    found = re.findall(
        rb"\xc4[\x02\x22\x42\x62\x82\xa2\xc2\xe2][\x05\x0d\x15\x1d\x25\x2d\x35\x3d\x45\x4d\x55\x5d\x65\x6d\x75\x7d]\x50",
        path.read_bytes(),
    )
    assert len(found) > 100


def test_arm_under_qemu(recording: Path, tmp_path: Path) -> None:
    emulator = tool("qemu-aarch64-static", "qemu-aarch64")
    program = compiled(tool("aarch64-linux-gnu-g++"), tmp_path, "-static")
    for build in ("portable", "neon-dotprod", "neon-i8mm"):
        said = replayed(emulator, "-cpu", "max", program, build, recording)
        assert f"{build}: " in said
        assert " 0 differences" in said
    old = subprocess.run(
        [emulator, "-cpu", "cortex-a72", program, "neon-dotprod", recording],
        capture_output=True,
        text=True,
    )
    assert old.returncode == 2  # a processor without these instructions: the build is not offered
    assert "does not have the build" in old.stderr
