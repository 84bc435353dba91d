"""Models in the published format, to be written: what a checkpoint folder holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import ARCHITECTURES, DecoderConfig
from outstride.models.dialects import places
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


def beside(source: Path, config: DecoderConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """All files of a checkpoint folder but the weights, by name; those of a folder as they are."""
    if not source.is_dir():
        return _from_gguf(source, config, tokenizer)
    found = {CONFIG: json.dumps(read_json(source / CONFIG) | {"torch_dtype": "float16"}, indent=1)}
    for name in _COPIED:
        if (source / name).is_file():
            found[name] = (source / name).read_text(encoding="utf-8")
    return found


def stored(config: DecoderConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with common names as a checkpoint holds them: with their own names, in half precision."""
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
    """The same from a GGUF file, if a folder can say all that it says."""
    said = _published(config, tokenizer)
    if tokenizer.marked or not _same(said, config):
        raise UnsupportedModel(
            f"{source} cannot be written as a checkpoint folder: its rope, its layers or its marks "
            "around a text have no place there; name the published checkpoint folder instead"
        )
    about: dict[str, Any] = dict(tokenizer.named)
    if tokenizer.chat_template is not None:
        about["chat_template"] = tokenizer.chat_template
    return {
        CONFIG: json.dumps(said, indent=1),
        TOKENIZER: tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(about, indent=1),
    }


def _same(said: Mapping[str, Any], config: DecoderConfig) -> bool:
    """Whether a `config.json` describes the same decoder."""
    try:
        found = DecoderConfig.from_hf(said)
    except (UnsupportedModel, CorruptModel):
        return False
    turns = [(one.frequencies, one.rope_scale) for one in (found, config)]
    return replace(found, rope=config.rope) == config and turns[0] == turns[1]


def _published(config: DecoderConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of a decoder without stretched rope."""
    [name, *_] = [name for name, kind in ARCHITECTURES.items() if kind == config.architecture]
    windows = {window for window in config.windows if window is not None}
    return {
        "architectures": [name],
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
