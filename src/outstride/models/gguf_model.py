"""Models in GGUF files: the config that metadata and tensors describe, and the tensors by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from outstride.core.graph import IntArray
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import DecoderConfig, RopeConfig, unsupported
from outstride.models.families import FAMILIES
from outstride.models.gguf_architectures import (
    BARE_NAMES,
    FACTORS,
    GGUF_ARCHITECTURES,
    LONG_FACTORS,
    OUTER_NAMES,
    SHORT_FACTORS,
    TENSOR_NAMES,
    GgufArchitecture,
    architecture_of,
    known_architectures,
)
from outstride.models.gguf_file import GgufFile
from outstride.models.stored import StoredModel, StoredTensor
from outstride.models.weights import check_shape

_SCALINGS = ("none", "linear", "yarn", "longrope")


def read_config(file: GgufFile) -> DecoderConfig:
    """The config of the decoder, from the metadata and the names of the tensors."""
    kind = GGUF_ARCHITECTURES.get(architecture_of(file))
    if kind is None:
        raise unsupported(file.architecture, known_architectures())
    if "token_embd.weight" not in file.tensors:
        raise CorruptModel(f"the tensor 'token_embd.weight' is missing in {file.path}")
    if file.get("expert_count", 0) and not any("ffn_gate_inp" in name for name in file.tensors):
        raise CorruptModel(f"{file.path} names experts and has none (blk.0.ffn_gate_inp.weight)")
    stated_layers = file.need("block_count")
    if not (isinstance(stated_layers, int) and 0 < stated_layers <= len(file.tensors)):
        raise CorruptModel(
            f"{file.path} states {stated_layers!r} layers and has {len(file.tensors)} tensors"
        )
    try:
        own = kind.config(file)
        rope = {**_rope(file), **own.pop("rope_scaling", {})}
        common = _common(file, kind)
        stated = {"rope_parameters": rope, **common, **own, "model_type": kind.family}
        config = DecoderConfig.from_hf(stated)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CorruptModel(f"the metadata of {file.path} are malformed: {error}") from error
    return replace(
        config,
        qkv_bias=_has(file, "attn_q.bias", "attn_qkv.bias"),
        output_bias=_has(file, "attn_output.bias"),
        mlp_bias=_has(file, "ffn_up.bias"),
        head_norms=_has(file, "attn_q_norm.weight"),
        norm_offset=0.0,  # the converter has added it
        rope=_with_factors(file, config.rope),
    )


def _has(file: GgufFile, *names: str) -> bool:
    """Whether any layer has one of these tensors; not all layers of a hybrid are alike."""
    found = {name.split(".", 2)[-1] for name in file.tensors if name.startswith("blk.")}
    return not found.isdisjoint(names)


def _common(file: GgufFile, kind: GgufArchitecture) -> dict[str, Any]:
    """The keys of `config.json` that all architectures have."""
    heads = int(file.need("attention.head_count"))
    rotated = int(file.get("rope.dimension_count") or file.head_dim)
    found: dict[str, Any] = {}
    if rotated != file.head_dim:
        if not FAMILIES[kind.family].partial_rope:
            raise UnsupportedModel("partial rotary embeddings are not supported")
        found["partial_rotary_factor"] = rotated / file.head_dim
    kv_heads = file.get("attention.head_count_kv") or heads
    inner = file.get("feed_forward_length") or file.need("expert_feed_forward_length")
    return {
        **found,
        "hidden_size": int(file.need("embedding_length")),
        "intermediate_size": inner[0] if isinstance(inner, list) else int(inner),
        "num_hidden_layers": file.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else int(kv_heads),
        "head_dim": file.head_dim,
        "max_position_embeddings": int(file.need("context_length")),
        "rms_norm_eps": float(file.need("attention.layer_norm_rms_epsilon")),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _rope(file: GgufFile) -> dict[str, Any]:
    """`rope_parameters` of a config."""
    theta = float(file.get("rope.freq_base", 10000.0))
    kind = str(file.get("rope.scaling.type") or "none")
    if kind not in _SCALINGS:
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not supported; supported are {', '.join(_SCALINGS[1:])}"
        )
    if kind == "none" or (kind == "longrope" and LONG_FACTORS not in file.tensors):
        return {"rope_type": "default", "rope_theta": theta}
    found = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": file.get("rope.scaling.factor"),
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        "beta_fast": file.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": file.get("rope.scaling.yarn_attn_factor")
        or file.get("rope.scaling.attn_factor"),
        "truncate": False if file.architecture == "gpt-oss" else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _with_factors(file: GgufFile, rope: RopeConfig) -> RopeConfig:
    """Files hold divisors of frequencies instead of the parameters that they follow from."""
    if rope.kind in ("default", "linear"):  # keeps the digests of files, which never stated it
        rope = replace(rope, original_context=0)
    if FACTORS not in file.tensors or rope.kind == "proportional":
        return rope
    found = file.tensor(FACTORS).floats(slice(None))
    return RopeConfig(theta=rope.theta, factors=tuple(float(x) for x in found))


def stored_model(file: GgufFile, config: DecoderConfig) -> StoredModel:
    """All tensors of a file under their checkpoint names; an error if one is missing or unknown."""
    kind = _kind_of(file.architecture, config)
    shapes, optional = config.shapes(), FAMILIES[config.architecture].optional
    tensors: dict[str, StoredTensor] = {}
    for name in file.tensors:
        if name in (FACTORS, LONG_FACTORS, SHORT_FACTORS) or _beyond(name, config):
            continue
        names = _checkpoint_names(name, kind, config)
        if len(names) == 1 and names[0] not in shapes and names[0].endswith(optional or ("\0",)):
            continue
        if any(ours not in shapes for ours in names):
            raise CorruptModel(f"the tensor {name!r} in {file.path} is not part of the model")
        tensors |= _split(file, name, {ours: shapes[ours] for ours in names}, config, kind)
    if missing := sorted(set(shapes) - set(tensors)):
        raise CorruptModel(f"the tensor {missing[0]!r} is missing in {file.path}")
    return StoredModel(config, tensors)


def _kind_of(architecture: str, config: DecoderConfig) -> GgufArchitecture:
    """The entry of a file whose metadata are dropped already."""
    kinds = [GGUF_ARCHITECTURES[architecture], *GGUF_ARCHITECTURES.values()]
    return next(kind for kind in kinds if kind.family == config.architecture)


def _beyond(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor belongs to a layer after the last one: one that predicts further tokens."""
    parts = name.split(".")
    return parts[0] == "blk" and parts[1].isdecimal() and int(parts[1]) >= config.layers


def _checkpoint_names(name: str, kind: GgufArchitecture, config: DecoderConfig) -> list[str]:
    """The names that the parts of a tensor have in a checkpoint, or its own if it has none."""
    if name in OUTER_NAMES:
        return [OUTER_NAMES[name]]
    parts = name.split(".")
    if parts[0] != "blk" or len(parts) not in (4, 5):
        return [name]
    at, rest = f"model.layers.{parts[1]}.", ".".join(parts[2:])
    if rest in BARE_NAMES:
        return [at + BARE_NAMES[rest]]
    names = kind.names.get(parts[2]) or TENSOR_NAMES.get(parts[2])
    if names is None:
        return [name]
    if len(parts) == 5:  # an expert of an old file: blk.0.ffn_gate.3.weight
        inner = names[0].removeprefix("mlp.")
        return [f"{at}mlp.experts.{parts[3]}.{inner}.{parts[4]}"]
    if "{}" in names[0]:
        count = config.experts.count if config.experts else 0
        each = [part.format(i) for i in range(count) for part in names]
        return [f"{at}{part}.{parts[3]}" for part in each] or [name]
    return [f"{at}{part}.{parts[3]}" for part in names]


def _split(
    file: GgufFile,
    name: str,
    wanted: dict[str, tuple[int, ...]],
    config: DecoderConfig,
    kind: GgufArchitecture,
) -> dict[str, StoredTensor]:
    """The parts of a tensor, row by row, as tensors of their own; nothing is copied."""
    found, shape = file.tensors[name].shape, next(iter(wanted.values()))
    rows = sum(each[0] for each in wanted.values())
    whole = (rows, *shape[1:])
    if len(wanted) > 1 and len(found) == len(shape) + 1:  # experts: [experts, rows, ...]
        whole = (found[0], rows // max(found[0], 1), *shape[1:])
    if len(wanted) == 1 and shape[:1] == (1,) and len(found) == len(shape) - 1:
        whole = shape[1:]  # a matrix of one row is stored as a vector
    check_shape(name, found, whole)
    tensors: dict[str, StoredTensor] = {}
    start = 0
    for ours, own in wanted.items():
        tensors[ours] = file.tensor(name, ours, _order(ours, own, config, kind), own, start)
        start += own[0]
    return tensors


def _order(
    name: str, shape: tuple[int, ...], config: DecoderConfig, kind: GgufArchitecture
) -> IntArray | None:
    """The order of rows that undoes the converter's, in which rotated pairs are adjacent rows."""
    heads = {".q_proj.": config.heads, ".k_proj.": config.kv_heads}
    permuted = [count for part, count in heads.items() if part in name]
    if not permuted or not kind.permuted:
        return None
    half = shape[0] // permuted[0] // 2
    rows = torch.arange(shape[0]).view(permuted[0], half, 2)
    return np.ascontiguousarray(rows.transpose(1, 2).reshape(-1).numpy())
