"""Quantized checkpoints: the values of each method's own convention, row by row, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.choose_weights import SAFETENSORS, SAFETENSORS_4BIT
from outstride.models.load import file_format_of, load, opened
from outstride.models.stored import StoredRows, StoredTensor
from outstride.models.unpack import mxfp4
from outstride.models.unpack.quantization import METHODS, Quantization, unpacked
from outstride.ops.cpu import native
from outstride.ops.cpu.int4 import Int4Matrix
from outstride.ops.matrix_rows import pack_all
from tests.models.checkpoints import expected, make, save
from tests.models.drive import Hand, tokens
from tests.models.quantized import Pack, awq, checkpoint, fp8, gptq

needs_kernels = pytest.mark.skipif(
    native.library_path() is None, reason="no native kernels were built"
)
GOLDEN = Path(__file__).parent / "golden" / "compressed.safetensors"
GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKINGS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (gptq(), {**GPTQ, "group_size": 64}),
    "gptq symmetric": (gptq(symmetric=True), GPTQ),
    "gptq 8 bits": (gptq(8, 128), {**GPTQ, "bits": 8}),
    "gptq 2 bits": (gptq(2, 32), {**GPTQ, "bits": 2}),
    "gptq desc_act": (gptq(shuffled=True), {**GPTQ, "desc_act": True}),
    "gptq v2": (gptq(version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq without g_idx": (gptq(with_groups=False), GPTQ),
    "awq": (awq(), {**AWQ, "version": "gemm"}),
    "awq 32": (awq(32), AWQ),
    "fp8 blocks": (fp8(128, 128), BLOCKS),
    "fp8 uneven blocks": (fp8(48, 80), {"quant_method": "fp8", "weight_block_size": [48, 80]}),
    "fp8 tensor": (
        fp8(0, 0, "weight_scale", input_scale=torch.ones(())),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8 tensor inv": (fp8(0, 0, activation_scale=torch.ones(())), {"quant_method": "fp8"}),
    "fp8 channel": (fp8(1, 0, "weight_scale"), {"quant_method": "fbgemm_fp8"}),
    "modelopt fp8": (
        fp8(0, 0, "weight_scale"),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
}
CODES = {"gptq", "gptq symmetric", "gptq v2", "gptq without g_idx", "awq", "awq 32"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))


def stored(folder: Path) -> dict[str, StoredTensor]:
    return opened(folder)[1]().tensors


@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_and_logits(packing: str, tmp_path: Path) -> None:
    folder, theirs = checkpoint(tmp_path / "m", *PACKINGS[packing])
    for name, tensor in stored(folder).items():
        right = theirs.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(tensor.floats(slice(None)), right, rtol=1e-6, err_msg=name)
        some = np.array([5, 0, len(right) // 2, 5, len(right) - 1])
        np.testing.assert_array_equal(tensor.floats(some), tensor.floats(slice(None))[some])
        np.testing.assert_array_equal(tensor.floats(slice(3, 7)), tensor.floats(slice(None))[3:7])
    prompt = tokens(20)
    ours = Hand(load(str(folder), pages=16, weights="fp32").model, [0, 1]).read(prompt)
    np.testing.assert_allclose(ours, expected(theirs, prompt).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packing", PACKINGS)
def test_which_files_count_as_4_bit(packing: str, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "m", *PACKINGS[packing])
    found = file_format_of(folder, opened(folder)[1])
    assert found == (SAFETENSORS_4BIT if packing in CODES else SAFETENSORS)


@needs_kernels
@pytest.mark.parametrize("packing", sorted(CODES))
def test_codes_are_taken_as_they_are(packing: str, tmp_path: Path) -> None:
    """The int4 matrix has the values of the file; only the minimum of a group is rounded."""
    folder, theirs = checkpoint(tmp_path / "m", *PACKINGS[packing])
    found = stored(folder)
    names = [f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkv"]
    order = np.array([*range(255, -1, -1), -1, 3, -1])
    for parts, rows_of in ((names, None), (names, order), (names[:1], None)):
        rows = StoredRows([found[name] for name in parts], rows_of)
        right = np.concatenate([theirs.get_parameter(name).detach().numpy() for name in parts])
        if rows_of is not None:
            right = np.where(rows_of[:, None] < 0, np.float32(0), right[rows_of])
        matrix = Int4Matrix.empty(*rows.shape, 160)
        pack_all([(matrix, rows)])
        step = np.abs(right).max(axis=1, keepdims=True) / 7
        off = np.abs(matrix.dense() - right)
        assert (off <= step / 128).all()
        if packing == "gptq symmetric":
            np.testing.assert_array_equal(matrix.dense(), right)


@needs_kernels
@pytest.mark.parametrize("packing", ["gptq", "gptq desc_act", "awq", "fp8 blocks"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_native_formats(packing: str, weights: str, tmp_path: Path) -> None:
    folder, theirs = checkpoint(tmp_path / "m", *PACKINGS[packing])
    prompt = tokens(20)
    right = expected(theirs, prompt).numpy()
    first = load(str(folder), pages=16, weights=weights).model
    ours = Hand(first, [0, 1]).read(prompt)
    bound = {"int8": 0.03, "int4": 0.08}[weights] if packing in CODES or weights == "int8" else 0.2
    assert np.sqrt(np.square(ours - right).mean() / np.square(right).mean()) < bound
    again = load(str(folder), pages=16, weights=weights).model
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(Hand(again, [0, 1]).read(prompt), ours)


@needs_kernels
def test_scales_beyond_half_precision_are_not_taken_as_codes(tmp_path: Path) -> None:
    folder, theirs = checkpoint(tmp_path / "m", *PACKINGS["gptq"])
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.layers.0.mlp.down_proj.scales"
    tensors[name] = tensors[name].to(torch.float32) * 2**-10
    safetensors.torch.save_file(tensors, path)
    tensor = stored(folder)["model.layers.0.mlp.down_proj.weight"]
    assert not tensor.has_codes
    right = theirs.get_parameter("model.layers.0.mlp.down_proj.weight").detach().numpy() * 2**-10
    np.testing.assert_allclose(tensor.floats(slice(None)), right, rtol=1e-6)


# --- the implementations of others --------------------------------------------------------------


def golden() -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    cases: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(GOLDEN, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            case, part = name.split("/")
            cases.setdefault(case, {})[part] = file.get_tensor(name)
        return json.loads(file.metadata()["settings"]), cases


@pytest.mark.parametrize("case", golden()[0])
def test_values_of_the_compressed_tensors_package(case: str) -> None:
    settings, cases = golden()
    parts = dict(cases[case])
    right = parts.pop("values").to(torch.float32)
    found = unpacked(
        {f"m.{name}": part for name, part in parts.items()},
        Quantization("compressed-tensors", settings[case]),
    )
    assert set(found) == {"m.weight"}
    tensor = found["m.weight"]
    assert isinstance(tensor, StoredTensor)
    assert tensor.shape == tuple(right.shape)
    ours = tensor.floats(slice(None))
    half = torch.from_numpy(ours).to(torch.bfloat16).to(torch.float32)  # as the package rounds
    torch.testing.assert_close(half, right, rtol=0, atol=0)
    np.testing.assert_array_equal(tensor.floats(np.array([20, 3])), ours[[20, 3]])
    assert tensor.has_codes == case.startswith("int4")
    if tensor.has_codes and native.library_path() is not None:
        matrix = Int4Matrix.empty(24, 192, 192)
        pack_all([(matrix, StoredRows([tensor]))])
        np.testing.assert_allclose(matrix.dense(), ours, atol=np.abs(ours).max() / 500)


def test_columns_that_compressed_tensors_reordered() -> None:
    settings, cases = golden()
    parts = {f"m.{n}": p for n, p in cases["int4 group"].items() if n != "values"}
    plain = unpacked(parts, Quantization("compressed-tensors", settings["int4 group"]))["m.weight"]
    groups = torch.arange(192) // 32
    order = torch.randperm(192, generator=torch.Generator().manual_seed(1))
    parts["m.weight_g_idx"] = groups[order].int()
    found = unpacked(parts, Quantization("compressed-tensors", settings["int4 group"]))["m.weight"]
    assert isinstance(plain, StoredTensor)
    assert isinstance(found, StoredTensor)
    scales = cases["int4 group"]["weight_scale"].to(torch.float32)
    codes = plain.floats(slice(None)) / scales[:, groups].numpy()
    right = codes * scales[:, groups[order]].numpy()
    np.testing.assert_allclose(found.floats(slice(None)), right, rtol=1e-6, atol=1e-7)
    assert not found.has_codes


@pytest.mark.parametrize("scale", [torch.float32, torch.uint8])
def test_fp8_values_of_transformers(scale: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 384, generator=source).to(torch.float8_e4m3fn)
    factors = torch.rand(2, 3, generator=source)
    if scale == torch.uint8:
        factors = torch.randint(110, 130, (2, 3), generator=source, dtype=torch.uint8)
    right = Fp8Dequantize(None)._dequantize_one(weight, factors, torch.float32)
    parts = {"m.weight": weight, "m.weight_scale_inv": factors}
    found = unpacked(parts, Quantization("fp8", {"weight_block_size": [128, 128]}))["m.weight"]
    assert isinstance(found, StoredTensor)
    np.testing.assert_array_equal(found.floats(slice(None)), right.numpy())


def test_mxfp4_values_of_transformers() -> None:
    source = torch.Generator().manual_seed(0)
    experts, rows, groups = 3, 10, 4
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=source)
    scales = torch.randint(118, 131, (experts, rows, groups), generator=source)
    blocks, scales = blocks.to(torch.uint8), scales.to(torch.uint8)
    right = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [.., columns, rows]
    at = "model.layers.0.mlp.experts"
    parts = {f"{at}.{n}_proj_{k}": t for n in ("gate_up", "down") for k, t in
             (("blocks", blocks), ("scales", scales))}  # fmt: skip
    found = unpacked(parts, Quantization("mxfp4", {}))
    names = {f"{at}.{i}.{n}_proj.weight" for i in range(3) for n in ("gate", "up", "down")}
    assert set(found) == names
    for expert in range(experts):
        for name, rows_of in (
            ("gate", slice(0, None, 2)),
            ("up", slice(1, None, 2)),
            ("down", slice(None)),
        ):
            tensor = found[f"{at}.{expert}.{name}_proj.weight"]
            assert isinstance(tensor, StoredTensor)
            whole = right[expert].T[rows_of].numpy()
            assert tensor.shape == whole.shape
            np.testing.assert_array_equal(tensor.floats(slice(None)), whole)
            np.testing.assert_array_equal(tensor.floats(slice(1, 3)), whole[1:3])
            np.testing.assert_array_equal(tensor.floats(np.array([3, 0])), whole[[3, 0]])


# --- what a checkpoint states -------------------------------------------------------------------


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_settings_in_files_of_their_own(tmp_path: Path) -> None:
    for file, pack, settings in (
        ("quantize_config.json", gptq(), {"bits": 4, "group_size": 64, "desc_act": False}),
        ("quant_config.json", awq(), {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
    ):
        folder, theirs = checkpoint(tmp_path / file, pack, None)
        (folder / file).write_text(json.dumps(settings))
        name = "model.layers.0.mlp.up_proj.weight"
        right = theirs.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(stored(folder)[name].floats(slice(None)), right, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes.*dequantize\(\)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4.*GGUF"),
        ({"quant_method": "hqq"}, "'hqq'.*GGUF"),
        ({"bits": 4}, "unnamed"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "sparse-24",
        ),
    ],
)
def test_methods_that_are_not_supported_are_named(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder, _ = checkpoint(tmp_path / "m", gptq(), settings)
    with pytest.raises(UnsupportedModel, match=says):
        load(str(folder), pages=4, weights="fp32")


@pytest.mark.parametrize(
    ("pack", "says"),
    [(gptq(), "GPTQ or AWQ"), (fp8(128, 128), "FP8"), (fp8(0, 0, "weight_scale"), "FP8")],
)
def test_parts_of_quantized_tensors_without_a_config(pack: Pack, says: str, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "m", pack, None)
    with pytest.raises(UnsupportedModel, match=f"{says}.*no quantization_config"):
        load(str(folder), pages=4, weights="fp32")


def test_modules_that_were_not_quantized(tmp_path: Path) -> None:
    keep = ("lm_head", "embed_tokens", "layers.1.self_attn")
    folder, theirs = checkpoint(
        tmp_path / "m", fp8(128, 128), {**BLOCKS, "modules_to_not_convert": list(keep)}, keep=keep
    )
    for name, tensor in stored(folder).items():
        right = theirs.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(tensor.floats(slice(None)), right, rtol=1e-6, err_msg=name)


def test_biases_next_to_codes(tmp_path: Path) -> None:
    folder, theirs = checkpoint(tmp_path / "m", gptq(), GPTQ, variant="llama biases")
    prompt = tokens(20)
    ours = Hand(load(str(folder), pages=16, weights="fp32").model, [0, 1]).read(prompt)
    np.testing.assert_allclose(ours, expected(theirs, prompt).numpy(), rtol=1e-4, atol=1e-4)


def test_scales_of_the_kv_cache_are_ignored_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = checkpoint(tmp_path / "m", *PACKINGS["fp8 tensor"])
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in ("k_scale", "v_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(())
    safetensors.torch.save_file(tensors, path)
    assert "model.layers.0.self_attn.k_scale" not in stored(folder)
    assert "2 scales of a quantized KV cache are ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("packing", "part", "change"),
    [
        ("gptq", "scales", lambda t: t[:, :-8].contiguous()),
        ("gptq", "qzeros", None),
        ("gptq", "qweight", lambda t: t.to(torch.int64)),
        ("gptq", "g_idx", lambda t: t + 9),
        ("awq", "qweight", lambda t: t[:, :-1].contiguous()),
        ("awq", "scales", lambda t: t[0]),
        ("fp8 blocks", "weight_scale_inv", lambda t: torch.ones(7, 5)),
        ("fp8 blocks", "weight_scale_inv", None),
        ("fp8 blocks", "weight", None),
    ],
)
def test_damaged_parts_are_named(packing: str, part: str, change: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "m", *PACKINGS[packing])
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = f"model.layers.1.mlp.up_proj.{part}"
    found = tensors.pop(name)
    if change is not None:
        tensors[name] = change(found)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CorruptModel, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(str(folder), pages=4, weights="fp32")


@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_nan_in_scales_is_reported(weights: str, tmp_path: Path) -> None:
    if weights != "fp32" and native.library_path() is None:
        pytest.skip("no native kernels were built")
    folder, _ = checkpoint(tmp_path / "m", *PACKINGS["gptq"])
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 3] = torch.nan
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CorruptModel, match=r"layers\.1\.mlp\.up_proj\.weight.*NaN"):
        load(str(folder), pages=4, weights=weights)


def test_every_method_has_a_test() -> None:
    named = {settings["quant_method"] for _, settings in PACKINGS.values()}
    assert named | {"compressed-tensors", "mxfp4"} == set(METHODS) | {"modelopt"}


def test_weights_of_quantized_experts(tmp_path: Path) -> None:
    """Experts are modules of their own in files of GPTQ."""
    model = make("qwen3 moe", hidden_size=64, moe_intermediate_size=32, num_experts=4)
    folder = save(model, tmp_path / "m")
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    values, pack = {}, gptq(4, 32)
    for name in [n for n in tensors if ".experts." in n]:
        parts, values[name] = pack(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{p}": t for p, t in parts.items()}
    assert len(values) == 3 * 4 * 3
    safetensors.torch.save_file(tensors, path)
    change_config(folder, quantization_config=GPTQ)
    found = stored(folder)
    for name, right in values.items():
        np.testing.assert_allclose(found[name].floats(slice(None)), right.numpy(), rtol=1e-6)


def mxfp4_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of [experts, columns, rows], as gpt-oss has them."""
    table = torch.tensor(mxfp4.VALUES[:8])
    groups = weight.transpose(1, 2).reshape(*weight.shape[::2], -1, 32)
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponent + 127).to(torch.uint8)


def test_gpt_oss_with_mxfp4_experts(tmp_path: Path) -> None:
    theirs = make("gpt oss", hidden_size=64, intermediate_size=32)
    folder = save(theirs, tmp_path / "m")
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    fused = [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(fused) == 2 * theirs.config.num_hidden_layers
    for name in fused:
        blocks, scales = mxfp4_parts(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        with torch.no_grad():
            theirs.get_parameter(name).copy_(values)
    safetensors.torch.save_file(tensors, path)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    prompt = tokens(20)
    ours = Hand(load(str(folder), pages=16, weights="fp32").model, [0, 1]).read(prompt)
    np.testing.assert_allclose(ours, expected(theirs, prompt).numpy(), rtol=1e-4, atol=1e-4)
