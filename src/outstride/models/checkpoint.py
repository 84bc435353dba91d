"""Checkpoints: a folder with `config.json` and one or several safetensors files."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.checkpoint_names import (
    HEAD,
    not_needed,
    places,
    published,
    text_name,
    unfused,
)
from outstride.models.config import DecoderConfig
from outstride.models.safetensors_header import PICKLE, check_safetensors
from outstride.models.stored import StoredModel, StoredTensor
from outstride.models.tokenizer import read_json
from outstride.models.unpack.quantization import quantization_of, unpacked
from outstride.models.unpack.tensors import TensorRows
from outstride.models.weights import check_shape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_LAYERS, _MAX_EXPERTS = 4096, 1 << 20
"""Layers, and experts of all layers together, that a config may state."""
_USE = (
    "to use it, load the base model with --adapter NAME={0}, or LLM(..., adapters={{NAME: {0!r}}})"
)
_HARMLESS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers of old checkpoints that are not needed: they are computed here."""


def adapter_files(folder: Path) -> list[Path]:
    """The files of a PEFT adapter (LoRA and the like) in a folder."""
    return [folder / name for name in _ADAPTER if (folder / name).is_file()]


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that `config.json` describes; a warning if there is an adapter that is not used."""
    adapter, use = adapter_files(folder), _USE.format(str(folder))
    if adapter and not (folder / "config.json").is_file():
        raise UnsupportedModel(
            f"{folder} holds a PEFT adapter ({adapter[0].name}) and no model; {use}"
        )
    if adapter:
        print(
            f"warning: {adapter[0]} is a PEFT adapter, which is ignored: the base model runs without "
            f"it; {use}",
            file=sys.stderr,
            flush=True,
        )
    if not (folder / "config.json").is_file():
        raise CorruptModel(f"{folder} has no config.json")
    config = read_json(folder / "config.json")
    quantization_of(folder, config)  # an unknown method is an error before anything is read
    _check_counts(folder, config)
    try:
        return DecoderConfig.from_hf(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptModel(f"{folder / 'config.json'} is malformed: {error}") from error


def _check_counts(folder: Path, config: Mapping[str, Any]) -> None:
    """An error if a config states more layers or experts than any model has: names are made for all."""
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        layers = _largest(section, "num_hidden_layers", "n_layers", "n_layer", "num_layers")
        experts = _largest(section, "num_experts", "num_local_experts", "n_routed_experts")
        if layers > _MAX_LAYERS or layers * experts > _MAX_EXPERTS:
            raise CorruptModel(
                f"{folder / 'config.json'} states {layers:,} layers and {experts:,} experts, which no "
                "model has"
            )


def _largest(section: Mapping[str, Any], *keys: str) -> int:
    found = [section.get(key) for key in keys]
    return max(
        (int(n) for n in found if isinstance(n, int | float) and abs(n) < math.inf), default=0
    )


def is_quantized(folder: Path) -> bool:
    """Whether the weights of a folder are quantized."""
    return quantization_of(folder, read_json(folder / "config.json")) is not None


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files, and what the index says each holds (None: no index)."""
    if (folder / _INDEX).is_file():
        placed = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(placed, dict):
            raise CorruptModel(f"{folder / _INDEX} lacks a weight_map")
        files: dict[Path, list[str] | None] = {}
        for name, file in placed.items():
            path = folder / Path(str(file)).name
            if not path.is_file():
                raise CorruptModel(f"{path} is missing; {_INDEX} names it for {name!r}")
            names = files.setdefault(path, [])
            assert names is not None
            names.append(str(name))
        return files
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    found = sorted(set(folder.glob("*.safetensors")) - set(adapter_files(folder)))
    if len(found) == 1:
        return {found[0]: None}
    pickles = [path for end in _PICKLES for path in sorted(folder.glob(f"*{end}"))]
    if pickles:
        raise UnsupportedModel(f"{folder} holds {pickles[0].name} and no safetensors; {PICKLE}")
    raise CorruptModel(f"{folder} has no {_SINGLE} and no {_INDEX}")


class CheckpointTensor(StoredTensor):
    """A tensor of a safetensors file, or some of its rows; the file is mapped into memory."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.shape, self._tensor = name, tuple(tensor.shape), tensor

    def floats(self, rows: IntArray | slice) -> FloatArray:
        part = self._tensor[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
        found: FloatArray = part.contiguous().to(torch.float32, copy=True).numpy()
        return found

    def raw(self) -> npt.NDArray[np.uint8]:
        raw: npt.NDArray[np.uint8] = self._tensor.contiguous().view(-1).view(torch.uint8).numpy()
        return raw.reshape(len(self._tensor), -1)


def stored_model(folder: Path, config: DecoderConfig) -> StoredModel:
    """All tensors under Llama's names; an error if one is missing, unknown or of another shape."""
    shapes = config.shapes()
    placed = places(shapes, config.architecture)
    unused = published(HEAD, config.architecture) if config.tied else None
    quantization = quantization_of(folder, read_json(folder / "config.json"))
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in unpacked(_text_tensors(folder, config), quantization).items():
        if name.endswith(_HARMLESS) or name == unused:
            continue
        if name in placed:
            tensors |= _split({part: shapes[part] for part in placed[name]}, tensor, name)
            continue
        if not_needed(name, config.architecture, config.layers):
            continue
        if isinstance(tensor, StoredTensor):
            raise UnsupportedModel(
                f"the tensor {name!r} in {folder} is quantized, and is not part of the model or holds "
                "several matrices; get the repository that it was made from, or a GGUF file"
            )
        parts = unfused(name, tensor, config)
        if parts is None:
            raise CorruptModel(f"the tensor {name!r} in {folder} is not part of the model")
        for part, found in parts.items():
            if part not in shapes:
                raise CorruptModel(f"the tensor {name!r} in {folder} holds {part!r}, no part of it")
            tensors |= _split({part: shapes[part]}, found, name)
    if missing := sorted(name for name, parts in placed.items() if parts[0] not in tensors):
        raise CorruptModel(f"the tensor {missing[0]!r} is missing in {folder}")
    return StoredModel(config, tensors)


def _text_tensors(folder: Path, config: DecoderConfig) -> dict[str, torch.Tensor]:
    """All tensors of the text model by their names without a prefix; a note if others are skipped."""
    tensors, skipped = {}, 0
    for stored_name, tensor in _mapped(folder).items():
        name = text_name(stored_name, config.architecture)
        skipped += name is None
        if name is not None:
            tensors[name] = tensor
    if skipped:
        print(
            f"note: {folder} is read as a text model: {skipped} tensors of vision, audio or "
            "multi-token prediction are skipped",
            file=sys.stderr,
            flush=True,
        )
    return tensors


def _mapped(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by their names in the files, which are mapped into memory."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    for path, listed in weight_files(folder).items():
        try:
            check_safetensors(path)
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                if listed and (lost := sorted(set(listed) - set(names))):
                    raise CorruptModel(f"the tensor {lost[0]!r} is missing in {path}")
                tensors |= {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptModel(f"{path} is cut off or damaged: {error}") from error
    return tensors


def _split(
    wanted: dict[str, tuple[int, ...]], tensor: torch.Tensor | StoredTensor, name: str
) -> dict[str, StoredTensor]:
    """A tensor, or its rows as several tensors in order, under the names that they have here."""
    sizes = [shape[0] for shape in wanted.values()]
    check_shape(name, tensor.shape, (sum(sizes), *next(iter(wanted.values()))[1:]))
    if isinstance(tensor, StoredTensor):
        if len(wanted) == 1:
            (tensor.name,) = wanted
            return {tensor.name: tensor}
        ends = np.cumsum(sizes)
        return {
            ours: TensorRows(ours, tensor, int(end) - size, int(end))
            for ours, size, end in zip(wanted, sizes, ends, strict=True)
        }
    if not tensor.is_floating_point():
        raise UnsupportedModel(f"the tensor {name!r} is not of a floating-point type")
    parts = torch.split(tensor, sizes)
    return {ours: CheckpointTensor(ours, part) for ours, part in zip(wanted, parts, strict=True)}
