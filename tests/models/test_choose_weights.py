"""`device` and `weights`: the table of `auto`, and what is refused with a reason."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from outstride import LLM
from outstride.cli.context import add_model_options
from outstride.errors import InvalidParams, UnsupportedModel
from outstride.models import choose_weights
from outstride.models.choose_weights import (
    AUTO_WEIGHTS,
    AVX2,
    DEVICES,
    FORMATS,
    GGUF,
    GGUF_4BIT,
    GPU,
    KERNELS,
    SAFETENSORS,
    SAFETENSORS_4BIT,
    TORCH,
    WEIGHTS,
    backend_of,
    place,
    placements,
)
from outstride.models.load import load
from outstride.ops.cpu import native
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelShape, unusual_layers
from tests.models.checkpoints import make, save
from tests.models.drive import tiny

ROOT = Path(__file__).resolve().parents[2]


class Gpu(Reference):
    """Stands for the CUDA backend on a machine without one."""

    @classmethod
    def supports(cls, shape: ModelShape) -> str | None:
        return "the CUDA kernels cannot run this" if unusual_layers(shape) else None


def machine(
    monkeypatch: pytest.MonkeyPatch, *, gpu: bool, kernels: bool, isa: str = "avx512-vnni"
) -> None:
    """A machine with or without a GPU, and with or without native kernels of some build."""
    problem = None if gpu else "torch sees no NVIDIA GPU"
    monkeypatch.setattr(choose_weights, "gpu_problem", lambda: problem)
    monkeypatch.setattr(choose_weights, "gpu_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(choose_weights, "_has_kernels", lambda: kernels)
    monkeypatch.setattr(native, "chosen_isa", lambda: native.ISAS.index(isa))
    real = backend_of
    monkeypatch.setattr(
        choose_weights, "backend_of", lambda p: Gpu if p.device == "cuda" else real(p)
    )


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("isa", [None, *native.ISAS])
@pytest.mark.parametrize("file_format", [GGUF_4BIT, GGUF, SAFETENSORS_4BIT, SAFETENSORS])
def test_auto_follows_the_table(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, isa: str | None, file_format: str
) -> None:
    machine(monkeypatch, gpu=gpu, kernels=isa is not None, isa=isa or "portable")
    processor = {None: TORCH, "avx2": AVX2}.get(isa, KERNELS)
    cpu = "cpu", processor, file_format
    found = placements("auto", "auto", file_format)
    if gpu:
        assert found[0] == ("cuda", AUTO_WEIGHTS["cuda", GPU, file_format])
    assert ("cpu", AUTO_WEIGHTS[cpu]) == found[int(gpu)]
    assert found[-1] == ("cpu", "fp32")
    assert placements("cpu", "auto", file_format) == found[int(gpu) :]


def test_the_documents_have_the_table() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    section = page.split("## Device and weights")[1].split("\n## ")[0]
    rows = [
        tuple(cell.strip().strip("`") for cell in line.strip("|").split("|"))
        for line in section.splitlines()
        if line.startswith("| `c")
    ]
    assert rows == [(*key, value) for key, value in AUTO_WEIGHTS.items()]


def test_every_format_has_a_device() -> None:
    assert {name for formats in FORMATS.values() for name in formats} == {*WEIGHTS} - {"auto"}
    assert {*FORMATS} == {*DEVICES} - {"auto"}
    assert {*choose_weights.BYTES} == {*WEIGHTS} - {"auto"}


def test_explicit_weights_choose_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True, kernels=True)
    for weights in ("fp32", "int8", "int4"):
        assert placements("auto", weights) == placements("cpu", weights) == [("cpu", weights)]
    assert placements("auto", "bf16") == placements("cuda", "bf16") == [("cuda", "bf16")]
    assert placements("cuda", "auto") == [("cuda", "bf16")]


@pytest.mark.parametrize(
    ("device", "weights", "gpu", "says"),
    [
        ("cuda", "int8", True, "device cuda does not compute in int8 yet.*bf16.*device cpu"),
        ("cuda", "int4", True, "device cuda does not compute in int4 yet.*bf16.*device cpu"),
        ("cuda", "fp32", True, "device cuda does not compute in fp32 yet.*bf16.*device cpu"),
        ("cpu", "bf16", True, "device cpu does not compute in bf16 yet.*int8 or int4.*device cuda"),
        ("auto", "bf16", False, "weights bf16 needs device cuda.*no NVIDIA GPU.*device cpu"),
        ("cuda", "auto", False, "device cuda does not work here.*no NVIDIA GPU.*device cpu"),
    ],
)
def test_what_a_device_cannot_do(
    monkeypatch: pytest.MonkeyPatch, device: str, weights: str, gpu: bool, says: str
) -> None:
    machine(monkeypatch, gpu=gpu, kernels=True)
    with pytest.raises(UnsupportedModel, match=says):
        placements(device, weights)


def test_int8_needs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=False, kernels=False)
    with pytest.raises(UnsupportedModel, match="compiler"):
        placements("cpu", "int8")


def test_other_words_are_refused() -> None:
    with pytest.raises(InvalidParams, match="fp32, bf16"):
        load("smollm2", weights="fp8")
    with pytest.raises(InvalidParams, match="cpu, cuda"):
        load("smollm2", device="tpu")


def test_a_gpu_that_is_taken_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, gpu=True, kernels=True)
    assert place(tiny(), placements()) == ("cuda", "bf16")
    assert capsys.readouterr().err == "using cuda:0 (NVIDIA Test), weights bf16\n"


def test_what_a_backend_does_not_run_goes_to_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, gpu=True, kernels=False)
    clipped = tiny(clip=4.0)
    assert place(clipped, placements()) == ("cpu", "fp32")
    assert "cannot run this: using cpu, weights fp32" in capsys.readouterr().err
    with pytest.raises(UnsupportedModel, match=r"cannot run this.*device cpu with weights fp32"):
        place(clipped, placements("cuda", "auto"))


def test_a_gpu_that_fails_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr("outstride.ops.cuda.available", lambda: True)
    monkeypatch.setattr("torch.ones", fails)
    choose_weights._tried_gpu.cache_clear()
    try:
        assert choose_weights.gpu_problem() == "CUDA error: no kernel image is available"
    finally:
        choose_weights._tried_gpu.cache_clear()
    monkeypatch.setattr("outstride.ops.cuda.available", lambda: False)
    assert "Triton" in (choose_weights.gpu_problem() or "")


def test_the_command_line_offers_the_same_values() -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    for weights in WEIGHTS:
        assert parser.parse_args(["--weights", weights]).weights == weights
    for device in DEVICES:
        assert parser.parse_args(["--device", device]).device == device
    for words in (["--weights", "fp8"], ["--device", "tpu"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)


def test_models_say_where_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))
    folder = str(save(make("llama"), tmp_path / "model"))
    prints, formats = set(), ["fp32", "int4"] + ["int8"] * (native.library_path() is not None)
    for weights in formats:
        with LLM(folder, device="cpu", weights=weights, pages=8) as llm:
            assert (llm.device, llm.weights) == ("cpu", weights)
            prints.add(llm.fingerprint)
    assert len(prints) == len(formats)
