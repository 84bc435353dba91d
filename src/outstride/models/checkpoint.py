"""Checkpoints: a folder with `config.json` and one or several safetensors files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.checkpoint_names import HEAD, places, published
from outstride.models.config import DecoderConfig
from outstride.models.stored import StoredModel, StoredTensor
from outstride.models.tokenizer import read_json
from outstride.models.weights import check_shape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_MERGE = "to use it, merge it into the base model (PEFT: merge_and_unload) and save the result"
_HARMLESS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers of old checkpoints that are not needed: they are computed here."""


def adapter_files(folder: Path) -> list[Path]:
    """The files of a PEFT adapter (LoRA and the like) in a folder."""
    return [folder / name for name in _ADAPTER if (folder / name).is_file()]


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that `config.json` describes; a warning if there is an adapter that is not used."""
    adapter = adapter_files(folder)
    if adapter and not (folder / "config.json").is_file():
        raise UnsupportedModel(
            f"{folder} holds a PEFT adapter ({adapter[0].name}) and no model; {_MERGE}"
        )
    if adapter:
        print(
            f"warning: {adapter[0]} is a PEFT adapter, which is ignored: the base model runs without "
            f"it; {_MERGE}",
            file=sys.stderr,
            flush=True,
        )
    if not (folder / "config.json").is_file():
        raise CorruptModel(f"{folder} has no config.json")
    config = read_json(folder / "config.json")
    if config.get("quantization_config"):
        raise UnsupportedModel(f"{folder} is a quantized checkpoint, which is not supported")
    return DecoderConfig.from_hf(config)


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
    if any(folder.glob("*.bin")):
        raise UnsupportedModel(
            f"{folder} has no safetensors files; other formats are not supported"
        )
    raise CorruptModel(f"{folder} has no {_SINGLE} and no {_INDEX}")


class CheckpointTensor(StoredTensor):
    """A tensor of a safetensors file, or some of its rows; the file is mapped into memory."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.shape, self._tensor = name, tuple(tensor.shape), tensor

    def floats(self, rows: IntArray | slice) -> FloatArray:
        part = self._tensor[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
        found: FloatArray = part.to(torch.float32, copy=True).numpy()
        return found

    def raw(self) -> npt.NDArray[np.uint8]:
        raw: npt.NDArray[np.uint8] = self._tensor.contiguous().view(-1).view(torch.uint8).numpy()
        return raw.reshape(len(self._tensor), -1)


def stored_model(folder: Path, config: DecoderConfig) -> StoredModel:
    """All tensors under Llama's names; an error if one is missing, unknown or of another shape."""
    from safetensors import SafetensorError, safe_open

    shapes = config.shapes()
    placed = places(shapes, config.architecture)
    unused = published(HEAD, config.architecture) if config.tied else None
    tensors: dict[str, StoredTensor] = {}
    for path, listed in weight_files(folder).items():
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                if listed and (lost := sorted(set(listed) - set(names))):
                    raise CorruptModel(f"the tensor {lost[0]!r} is missing in {path}")
                for name in names:
                    if name.endswith(_HARMLESS) or name == unused:
                        continue
                    if name not in placed:
                        raise CorruptModel(
                            f"the tensor {name!r} in {path} is not part of the model"
                        )
                    wanted = {part: shapes[part] for part in placed[name]}
                    tensors |= _split(wanted, file.get_tensor(name), name, path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptModel(f"{path} is cut off or damaged: {error}") from error
    if missing := sorted(name for name, parts in placed.items() if parts[0] not in tensors):
        raise CorruptModel(f"the tensor {missing[0]!r} is missing in {folder}")
    return StoredModel(config, tensors)


def _split(
    wanted: dict[str, tuple[int, ...]], tensor: torch.Tensor, name: str, path: Path
) -> dict[str, StoredTensor]:
    """A tensor, or its rows as several tensors in order, under the names that they have here."""
    if not tensor.is_floating_point():
        raise UnsupportedModel(f"the tensor {name!r} in {path} is not of a floating-point type")
    sizes = [shape[0] for shape in wanted.values()]
    check_shape(name, tensor.shape, (sum(sizes), *next(iter(wanted.values()))[1:]))
    parts = torch.split(tensor, sizes)
    return {ours: CheckpointTensor(ours, part) for ours, part in zip(wanted, parts, strict=True)}
