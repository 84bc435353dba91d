"""What all folders of draft heads share: config, tensors, shape checks, layers, bigram tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outstride.core.draft_heads import BigramTable
from outstride.core.graph import IntArray
from outstride.errors import CorruptModel, ModelNotFound, UnsupportedModel, VocabularyMismatch
from outstride.models import weights
from outstride.models.checkpoint import weight_files
from outstride.models.config import DecoderConfig
from outstride.ops.weights import LayerWeights


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFound(f"{folder} is not a draft head: it has no config.json")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptModel(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptModel(f"{file} is not a JSON object")
    return found


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder; int8 matrices are multiplied with their scales."""
    raw = _read_files(folder)
    result = {}
    for name, tensor in raw.items():
        if name.endswith(".scale") and name.removesuffix(".scale") in raw:
            continue
        if tensor.dtype == torch.int8:
            tensor = tensor.float() * raw[f"{name}.scale"].float()[:, None]
        result[name] = tensor.float() if tensor.is_floating_point() else tensor
    return result


def _read_files(folder: Path) -> dict[str, torch.Tensor]:
    """Safetensors, in one file or several; or one pickled file, as older drafters have it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    pickled = [file for ending in ("bin", "pt") for file in sorted(folder.glob(f"*.{ending}"))]
    if not any(folder.glob("*.safetensors")) and len(pickled) == 1:
        try:
            found = torch.load(pickled[0], map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptModel(f"{pickled[0]} cannot be read: {error}") from error
        if not isinstance(found, dict) or not all(torch.is_tensor(t) for t in found.values()):
            raise CorruptModel(f"{pickled[0]} does not hold tensors by name")
        return found
    raw: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            raw |= load_file(str(file))
        except (OSError, SafetensorError) as error:
            raise CorruptModel(f"{file} cannot be read: {error}") from error
    return raw


def check(config: DecoderConfig, target: Mapping[str, Any], folder: Path, vocabulary: str) -> None:
    """Raises an error if a folder was trained for another model; target: what its config says of it."""
    for key in ("hidden_size", "layers", "vocab_size"):
        if key in target and target[key] != getattr(config, key):
            raise UnsupportedModel(
                f"{folder} was trained for {target.get('name', 'a model')} with {key} "
                f"{target[key]}; this model has {getattr(config, key)}"
            )
    if vocabulary and target.get("vocabulary", vocabulary) != vocabulary:
        raise VocabularyMismatch(
            f"{folder} was trained for {target.get('name', 'a model')}, whose vocabulary is not "
            "this model's"
        )


def shaped(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in float32; raises CorruptModel if it is missing or of another shape."""
    if name not in tensors:
        raise CorruptModel(f"the tensor {name!r} is missing")
    weights.check_shape(name, tuple(tensors[name].shape), shape)
    return weights.joined([tensors[name]])


def bigram_of(
    tensors: Mapping[str, torch.Tensor], vocabulary: IntArray, vocab_size: int
) -> BigramTable:
    """The bigram tables of our own recipes, for a draft head with this vocabulary [tokens]."""
    count, rank = len(vocabulary), tensors["follow.after.weight"].shape[1]
    rows = np.full(vocab_size, count, dtype=np.int64)
    rows[vocabulary] = np.arange(count)  # a token that does not exist is an IndexError
    return BigramTable(
        rows,
        left=shaped(tensors, "follow.before.weight", (count + 1, rank)).numpy(),
        right=shaped(tensors, "follow.after.weight", (count, rank)).numpy(),
    )


def layer(
    tensors: Mapping[str, torch.Tensor],
    at: str,
    config: DecoderConfig,
    *,
    inner: int | None = None,
    reads: int = 1,
    norm: str | None = "input_layernorm",
) -> LayerWeights:
    """A layer of a draft head, whose tensor names begin with `at`; it has the model's number of heads.

    Biases and head norms are optional.
    inner: the width of its MLP; None: the model's.
    reads: how many concatenated rows the QKV projection reads (EAGLE-3: 2).
    norm: the name of the norm before attention; None: there is none.
    """
    size, inner = config.hidden_size, inner or config.intermediate_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def take(name: str, *shape: int) -> torch.Tensor:
        return shaped(tensors, f"{at}{name}.weight", shape)

    def heads(kind: str, *width: int) -> torch.Tensor:
        q, k, v = (
            shaped(tensors, f"{at}self_attn.{name}_proj.{kind}", (rows, *width))
            for name, rows in (("q", wide), ("k", narrow), ("v", narrow))
        )
        return weights.joined([*(weights.rotated_first(part, config) for part in (q, k)), v])

    def head_norm(name: str) -> torch.Tensor | None:
        if f"{at}self_attn.{name}.weight" not in tensors:
            return None
        found = take(f"self_attn.{name}", config.head_dim)
        return weights.joined([weights.rotated_first(found, config)])

    biased = f"{at}self_attn.q_proj.bias" in tensors
    output_bias = f"{at}self_attn.o_proj.bias"
    return LayerWeights(
        attention_norm=torch.empty(0) if norm is None else take(norm, size),
        qkv=heads("weight", reads * size),
        qkv_bias=heads("bias") if biased else None,
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=take("self_attn.o_proj", size, wide),
        output_bias=shaped(tensors, output_bias, (size,)) if output_bias in tensors else None,
        mlp_norm=take("post_attention_layernorm", size),
        gate_up=weights.joined([take(f"mlp.{name}_proj", inner, size) for name in ("gate", "up")]),
        gate_up_bias=None,
        down=take("mlp.down_proj", size, inner),
        down_bias=None,
    )
