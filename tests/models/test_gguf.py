"""GGUF files written by the `gguf` package from transformers models, read back by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outstride.errors import CorruptModel, UnsupportedModel
from tests.models.checkpoints import expected, make
from tests.models.drive import Hand, load, tokens

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
Kind = gguf.GGMLQuantizationType
BIG = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
"""Rows that are whole blocks of 32."""


def file_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def interleave(values: Any, heads: int) -> Any:
    """The order of rows that llama.cpp's converter writes for queries and keys."""
    half = values.shape[0] // heads // 2
    split = values.reshape(heads, 2, half, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def write(model: Any, path: Path, kind: Any = Kind.F32, *, permuted: bool, **options: Any) -> Path:
    """Writes a model; with a lossy kind, the model's own weights are rounded alike."""
    config = model.config
    writer = gguf.GGUFWriter(path, options.get("architecture", config.model_type))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if (size := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["w", "1", "w1", *(f"x{i}" for i in range(94))])
    writer.add_token_types([1] * 97)
    writer.add_token_merges(["w 1"])
    for add in options.get("metadata", ()):
        add(writer)
    for name, values in options.get("tensors", {}).items():
        writer.add_tensor(name, values)
    skipped = options.get("without", ())
    for name, parameter in model.named_parameters():
        if file_name(name) in skipped:
            continue
        values = parameter.detach().numpy()
        used = Kind.F32 if values.ndim == 1 else kind
        if used != Kind.F32:
            packed = gguf.quants.quantize(values, used)
            rounded = gguf.quants.dequantize(packed, used).astype(np.float32)
            parameter.data.copy_(torch.from_numpy(rounded))
            values = rounded
        if permuted and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        if permuted and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        if used == Kind.F32:
            writer.add_tensor(file_name(name), values)
        else:
            writer.add_tensor(file_name(name), gguf.quants.quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def compare(path: Path, theirs: Any) -> None:
    model = load(str(path), pages=64).model
    prompt = tokens(70)
    ours = Hand(model, list(range(12))).read(prompt, 30)
    np.testing.assert_allclose(ours, expected(theirs, prompt).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "permuted"),
    [
        ("llama", True),
        ("llama tied", True),
        ("llama biases", True),
        ("llama head_dim", True),
        ("llama theta", True),
        ("qwen2", False),
        ("qwen3", False),
        ("qwen3 tied biases", False),
        ("smollm3", True),
    ],
)
def test_logits_of_transformers(variant: str, permuted: bool, tmp_path: Path) -> None:
    more = {"no_rope_layer_interval": 4, "num_hidden_layers": 5} if variant == "smollm3" else {}
    theirs = make(variant, **more)
    compare(write(theirs, tmp_path / "m.gguf", permuted=permuted), theirs)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_packed_weights(kind: Any, tmp_path: Path) -> None:
    theirs = make("llama", **BIG)
    compare(write(theirs, tmp_path / "m.gguf", kind, permuted=True), theirs)


def test_mistral_is_stored_as_llama(tmp_path: Path) -> None:
    theirs = make("mistral window")
    window = theirs.config.sliding_window
    path = write(
        theirs,
        tmp_path / "m.gguf",
        permuted=True,
        architecture="llama",
        metadata=[lambda writer: writer.add_sliding_window(window)],
    )
    compare(path, theirs)


def test_linear_rope(tmp_path: Path) -> None:
    theirs = make("llama linear")

    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    compare(write(theirs, tmp_path / "m.gguf", permuted=True, metadata=[scaling]), theirs)


def test_yarn_rope(tmp_path: Path) -> None:
    theirs = make("llama yarn")

    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    compare(write(theirs, tmp_path / "m.gguf", permuted=True, metadata=[scaling]), theirs)


def test_factors_of_frequencies(tmp_path: Path) -> None:
    theirs = make("llama llama3")
    plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq).numpy()
    path = tmp_path / "m.gguf"
    write(theirs, path, permuted=True, tensors={"rope_freqs.weight": factors})
    compare(path, theirs)


def test_missing_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(make("llama"), path, permuted=True, without=("blk.1.ffn_up.weight",))
    with pytest.raises(CorruptModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        load(str(path))


def test_unknown_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    odd = {"blk.0.attn_sinks.weight": np.zeros(6, dtype=np.float32)}
    write(make("llama"), path, permuted=True, tensors=odd)
    with pytest.raises(CorruptModel, match=r"blk\.0\.attn_sinks\.weight.*not part of"):
        load(str(path))


@pytest.mark.parametrize("size", [3, 30, 1000, -500])
def test_cut_off_file(size: int, tmp_path: Path) -> None:
    path = write(make("llama"), tmp_path / "m.gguf", permuted=True)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptModel, match="cut off"):
        load(str(path))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModel, match="not a GGUF file"):
        load(str(path))


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = write(make("llama"), tmp_path / "m.gguf", permuted=True, architecture="mamba")
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2, qwen3, smollm3"):
        load(str(path))


def test_mixture_of_experts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(make("llama"), path, permuted=True, metadata=[lambda w: w.add_expert_count(8)])
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        load(str(path))


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    write(make("llama"), tmp_path / "m.gguf", permuted=True)
    assert load(str(tmp_path), pages=2).path == tmp_path / "m.gguf"
