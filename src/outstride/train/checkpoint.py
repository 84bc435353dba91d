"""Files of a training run: the checkpoint that it resumes from, and the result.

Every file is written under a temporary name and renamed. The last good one is always whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outstride.errors import InvalidData
from outstride.train.corpus_files import replacing

RECIPE, CONFIG, MODEL, LOSS_PLOT = "recipe.json", "config.json", "model.safetensors", "loss.svg"
VERSION = 1
_LAST = "checkpoint/last.safetensors"
_LARGE = 1 << 16
"""Smallest number of elements of a matrix that is stored in 8 bits."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class TrainingProgress:
    """Progress of a run."""

    step: int = 0
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    """Measurements, each with its step."""
    seconds: float = 0.0


def save(
    folder: Path,
    identity: Mapping[str, Any],
    progress: TrainingProgress,
    weights: Mapping[str, torch.Tensor],
    optimizer: torch.optim.AdamW,
    numbers: torch.Generator,
) -> None:
    """Saves everything that a run needs to resume exactly."""
    tensors = {f"weight.{name}": value.detach() for name, value in weights.items()}
    for name, value in weights.items():
        for moment in _MOMENTS:
            if (found := optimizer.state.get(value, {}).get(moment)) is not None:
                tensors[f"{moment}.{name}"] = found
    tensors["numbers"] = numbers.get_state()
    tensors["losses"] = torch.tensor(progress.losses, dtype=torch.float64)
    about = {
        "identity": json.dumps(identity),
        "step": str(progress.step),
        "steps": str(progress.steps),
        "seconds": str(progress.seconds),
        "measured": json.dumps(progress.measured),
    }
    place = folder / _LAST
    place.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: value.cpu().contiguous() for name, value in tensors.items()}
    with replacing(place) as fresh:
        save_file(whole, fresh, about)


def restore(
    folder: Path,
    identity: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    optimizer: torch.optim.AdamW,
    numbers: torch.Generator,
) -> TrainingProgress | None:
    """Restores a run from a checkpoint of the same run; None if there is no checkpoint."""
    place = folder / _LAST
    if not place.is_file():
        return None
    try:
        with safe_open(place, "pt") as file:
            about = file.metadata() or {}
            same_run(folder, json.loads(about["identity"]), identity)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step = int(about["step"])
        progress = TrainingProgress(
            step=step,
            steps=int(about["steps"]),
            losses=found["losses"].tolist(),
            measured=json.loads(about["measured"]),
            seconds=float(about["seconds"]),
        )
        with torch.no_grad():
            for name, value in weights.items():
                value.copy_(found[f"weight.{name}"])
        for name, value in weights.items():
            if f"{_MOMENTS[0]}.{name}" in found:
                place_of = value.device if optimizer.defaults["fused"] else "cpu"
                optimizer.state[value] = {
                    "step": torch.tensor(float(step), device=place_of),
                    **{m: found[f"{m}.{name}"].to(value.device) for m in _MOMENTS},
                }
        numbers.set_state(found["numbers"])
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise InvalidData(
            f"{place} is damaged ({error}); delete {place.parent} to begin anew"
        ) from error
    return progress


def forget(folder: Path) -> None:
    """Removes the checkpoint of a finished run."""
    shutil.rmtree((folder / _LAST).parent, ignore_errors=True)


def same_run(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises an error if a folder holds a different run."""
    for key in sorted({*was, *now}):
        if isinstance(was.get(key), dict) and isinstance(now.get(key), dict):
            same_run(folder, was[key], now[key])
        elif was.get(key) != now.get(key):
            raise InvalidData(
                f"{folder} holds another training: {key} was {was.get(key)!r} there and is "
                f"{now.get(key)!r} now; give the same options to go on, or another folder"
            )


# --- the result ------------------------------------------------------------------------------------


def finished(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recipe file of a folder in which this run has finished; a different run there is an error."""
    if not (folder / MODEL).is_file():
        return None
    try:
        about = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        was = about["run"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidData(
            f"{folder} holds a {MODEL} that did not come from here; choose another folder"
        ) from error
    same_run(folder, was, identity)
    return dict(about)


def write_json(place: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as fresh:
        fresh.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def packed(tensors: Mapping[str, torch.Tensor], *, int8: bool) -> dict[str, torch.Tensor]:
    """Tensors as they are stored: float16, large matrices in int8 with a scale per row if `int8`."""
    stored: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        value = value.detach().cpu()
        if not value.is_floating_point():
            stored[name] = value.contiguous()
        elif int8 and value.dim() == 2 and value.numel() >= _LARGE:
            scale = value.float().abs().amax(1).clamp(min=1e-12) / 127.0
            stored[name] = (value.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            stored[f"{name}.scale"] = scale
        else:
            stored[name] = value.to(torch.float16).contiguous()
    return stored


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    int8: bool,
) -> int:
    """Writes config.json and model.safetensors; returns the bytes of the latter."""
    write_json(folder / CONFIG, config)
    with replacing(folder / MODEL) as fresh:
        save_file(packed(tensors, int8=int8), fresh, {"format": "pt"})
    return (folder / MODEL).stat().st_size
