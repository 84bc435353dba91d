"""Checkpoint folders in the published format, for models that are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.checkpoint_names import places
from outstride.models.config import DecoderConfig
from outstride.models.families import FAMILIES
from outstride.models.tokenizer import Tokenizer, read_json

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_COPIED = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def companion_files(source: Path, config: DecoderConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """All files of a checkpoint folder except the weights, by name and text."""
    if not source.is_dir():
        return _from_gguf(source, config, tokenizer)
    found = {CONFIG: json.dumps(read_json(source / CONFIG) | {"torch_dtype": "float16"}, indent=1)}
    for name in _COPIED:
        if (source / name).is_file():
            found[name] = (source / name).read_text(encoding="utf-8")
    return found


def stored(config: DecoderConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as a checkpoint of the family stores them: with its names, in half precision."""
    found = {
        theirs: torch.cat([tensors[name].detach() for name in ours])
        .to("cpu", torch.float16)
        .contiguous()
        for theirs, ours in places(config.shapes(), config.architecture).items()
    }
    if not all(bool(value.isfinite().all()) for value in found.values()):
        raise CorruptModel("some weights are too large for half precision, or no numbers")
    return found


def _from_gguf(source: Path, config: DecoderConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """The files for a model from a GGUF file; an error if a folder cannot express it."""
    values = _published(config, tokenizer)
    if tokenizer.marked or not _same(values, config):
        raise UnsupportedModel(
            f"{source} cannot be written as a checkpoint folder: its RoPE scaling, its layers or "
            "its special tokens around a text cannot be expressed there; name the published "
            "checkpoint folder instead"
        )
    about: dict[str, Any] = dict(tokenizer.named)
    if tokenizer.chat_template is not None:
        about["chat_template"] = tokenizer.chat_template
    return {
        CONFIG: json.dumps(values, indent=1),
        TOKENIZER: tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(about, indent=1),
    }


def _same(values: Mapping[str, Any], config: DecoderConfig) -> bool:
    """Whether a `config.json` describes the same decoder."""
    try:
        found = DecoderConfig.from_hf(values)
    except (UnsupportedModel, CorruptModel):
        return False
    ropes = [(one.frequencies, one.rope_scale) for one in (found, config)]
    return replace(found, rope=config.rope) == config and ropes[0] == ropes[1]


def _published(config: DecoderConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `config.json` of a decoder without RoPE scaling."""
    windows = {window for window in config.windows if window is not None}
    return {
        "architectures": [FAMILIES[config.architecture].classes[0]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied,
        "sliding_window": min(windows, default=None),
        "eos_token_id": sorted(tokenizer.eos_ids),
        "bos_token_id": tokenizer.bos_id,
        "torch_dtype": "float16",
    }
