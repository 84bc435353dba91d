"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

The file's tensors say which matrices are adapted; the config says how they are scaled. Matrices that a
decoder multiplies in one product get one pair of factors, whose parts do not mix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outstride.errors import CorruptModel, ModelNotFound, UnsupportedModel
from outstride.models import weights
from outstride.models.checkpoint import adapter_files
from outstride.models.checkpoint_names import places
from outstride.models.config import DecoderConfig
from outstride.models.tokenizer import read_json
from outstride.ops.weights import AdapterWeights, LoraWeights, unusual_layers

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The matrices of each product of a layer."""
ADAPTABLE = (
    "experts",
    "wide_norms",
    "clip",
    "activation",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "pre_norms",
    "post_norms",
    "sinks",
    "local_rope",
    "query_growth",
    "value_norms",
)
"""The switches that leave the products of a layer as they are in Llama. Others are refused."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that also change the base model: such factors do not fit the published weights."""
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that fits a model."""

    digest: str
    layers: list[AdapterWeights]


@dataclass(frozen=True, slots=True)
class _Factors:
    """The factors of one module of the base model, which may hold several matrices."""

    names: list[str]
    """The matrices, in the order of their rows, by their Llama names."""
    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank], scaled"""


def read(folder: Path, config: DecoderConfig) -> LoraAdapter:
    """Reads an adapter for a model with this config; refuses what it cannot run, with the reason."""
    about = _read_config(folder)
    if what := unusual_layers(config, runs=ADAPTABLE):
        raise UnsupportedModel(f"adapters cannot be attached to a model with {what} yet")
    shapes = config.shapes()
    modules = _modules(folder, config, shapes, about)
    digest, layers = hashlib.sha256(), []
    for name in sorted(modules):
        digest.update(name.encode())
        digest.update(modules[name].a.numpy().tobytes())
        digest.update(modules[name].b.numpy().tobytes())
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        products = {
            product: _joined(config, shapes, [at + part + ".weight" for part in parts], modules)
            for product, parts in PRODUCTS.items()
        }
        layers.append(AdapterWeights(**products))
    return LoraAdapter(digest.hexdigest()[:16], layers)


def _joined(
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    modules: Mapping[str, _Factors],
) -> LoraWeights | None:
    """What the adapter adds to the product of these matrices; None: nothing."""
    found = [module for module in modules.values() if set(module.names) & set(names)]
    if not found:
        return None
    starts, total = {}, 0
    for name in names:
        starts[name], total = total, total + shapes[name][0]
    rank = sum(len(module.a) for module in found)
    b, column = torch.zeros(total, rank), 0
    for module in found:
        end = column + len(module.a)
        parts = torch.split(module.b, [shapes[name][0] for name in module.names])
        for name, part in zip(module.names, parts, strict=True):
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                part = weights.rotated_first(part, config)
            b[starts[name] : starts[name] + len(part), column:end] = part
        column = end
    return LoraWeights(torch.cat([module.a for module in found]), b)


# --- the config -----------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json; an error with the reason if the adapter needs more than low-rank factors."""
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{folder} is not a PEFT adapter: it has no {CONFIG}")
    about = read_json(folder / CONFIG)
    kind = about.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{folder} is a PEFT adapter of type {kind}; only LORA is supported")
    bias, start = about.get("bias", "none"), str(about.get("init_lora_weights", "")).lower()
    saved = about.get("modules_to_save") or []
    for present, what in (
        (about.get("use_dora"), "DoRA (use_dora)"),
        (saved, f"whole modules (modules_to_save: {', '.join(map(str, saved))})"),
        (bias not in ("none", None), f"biases (bias: {bias})"),
        (about.get("lora_bias"), "biases of its factors (lora_bias)"),
        (about.get("layer_replication"), "repeated layers (layer_replication)"),
        (about.get("trainable_token_indices"), "embeddings (trainable_token_indices)"),
        (about.get("target_parameters"), "parameters of experts (target_parameters)"),
        (about.get("alora_invocation_tokens"), "activation by tokens (aLoRA)"),
        (about.get("use_qalora"), "grouped inputs (QALoRA)"),
        (about.get("use_bdlora"), "block-diagonal factors (BD-LoRA)"),
        (start.startswith(_CHANGED_BASE), f"a changed base model (init_lora_weights: {start})"),
    ):
        if present:
            raise UnsupportedModel(
                f"{folder} has {what}, which is not supported; to use it, merge it into the base "
                "model (PEFT: merge_and_unload) and save the result"
            )
    try:
        about["r"], about["lora_alpha"] = int(about["r"]), float(about["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"{folder / CONFIG} is damaged: {error!r}") from error
    return about


def _scale(about: Mapping[str, Any], module: str) -> tuple[int, float]:
    """The rank of a module's factors, and what their product is multiplied by."""
    try:
        rank = int(_by_pattern(about.get("rank_pattern"), module, about["r"]))
        alpha = float(_by_pattern(about.get("alpha_pattern"), module, about["lora_alpha"]))
        return rank, alpha / (rank**0.5 if about.get("use_rslora") else rank)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, re.error) as error:
        raise CorruptModel(f"rank_pattern or alpha_pattern is damaged: {error}") from error


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that the module's name ends with, as a regular expression."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _targeted(about: Mapping[str, Any], module: str) -> bool:
    """Whether the config names a module of the base model as one to be adapted."""

    def listed(names: str | Iterable[str]) -> bool:
        if isinstance(names, str):
            return re.fullmatch(names, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    targets, chosen = about.get("target_modules"), about.get("layers_to_transform")
    excluded = about.get("exclude_modules")
    try:
        if targets is None or (excluded and listed(excluded)):
            return False
        if targets != "all-linear" and not listed(targets):
            return False
        if chosen is None or isinstance(targets, str):
            return True
        number = re.match(r".*\.[^.]*\.(\d+)\.", f"{module}.")
        wanted = [chosen] if isinstance(chosen, int) else list(chosen)
        return number is not None and int(number[1]) in wanted
    except (TypeError, re.error) as error:
        raise CorruptModel(f"target_modules or layers_to_transform is damaged: {error}") from error


# --- the tensors ----------------------------------------------------------------------------------


def _modules(
    folder: Path,
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    about: Mapping[str, Any],
) -> dict[str, _Factors]:
    """The factors of each adapted module, by the name that the base model has for it."""
    placed = {
        name.removesuffix(".weight"): parts
        for name, parts in places(shapes, config.architecture).items()
        if name.endswith("_proj.weight") or len(shapes[parts[0]]) == 2
    }
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    tensors = _read_tensors(folder)
    base = about.get("base_model_name_or_path") or "another model"
    for name, tensor in tensors.items():
        module, factor = _module_of(folder, name)
        if module not in placed:
            module = module.replace("language_model.", "", 1)
        if module not in placed:
            raise UnsupportedModel(
                f"{folder} adapts {module!r}, which this model does not have: it was trained for {base}"
            )
        if not _adaptable(placed[module][0]):
            raise UnsupportedModel(
                f"{folder} adapts {module!r}; only query, key, value, output, gate, up and down "
                "projections of dense layers are supported"
            )
        pairs.setdefault(module, {})[factor] = tensor
    for module in placed:
        if _adaptable(placed[module][0]) and _targeted(about, module):
            pairs.setdefault(module, {})
    found = {}
    for module, pair in pairs.items():
        for factor in "AB":
            if factor not in pair:
                raise CorruptModel(
                    f"the tensor '{module}.lora_{factor}.weight' is missing in {folder}"
                )
        names, (rank, scale) = placed[module], _scale(about, module)
        rows, columns = sum(shapes[name][0] for name in names), shapes[names[0]][1]
        try:
            weights.check_shape(f"{module}.lora_A.weight", pair["A"].shape, (rank, columns))
            weights.check_shape(f"{module}.lora_B.weight", pair["B"].shape, (rows, rank))
        except CorruptModel as error:
            raise UnsupportedModel(f"{error}; {folder} was trained for {base}") from error
        found[module] = _Factors(names, pair["A"].contiguous(), pair["B"] * scale)
    if not found:
        raise CorruptModel(f"{folder} has no LoRA factors")
    return found


def _adaptable(name: str) -> bool:
    """Whether a matrix, by its Llama name, is one of `PRODUCTS`."""
    part = name.removeprefix("model.layers.").partition(".")[2].removesuffix(".weight")
    return any(part in parts for parts in PRODUCTS.values())


def _module_of(folder: Path, name: str) -> tuple[str, str]:
    """The module that a tensor belongs to, and which of its two factors it is."""
    for words, what in (
        ("lora_embedding_", "embeddings"),
        ("lm_head.", "the LM head"),
        ("embed_tokens.", "embeddings"),
        ("lora_magnitude_vector", "DoRA"),
    ):
        if words in name:
            raise UnsupportedModel(
                f"{folder} adapts {what} ({name}), which is not supported; to use it, merge it into "
                "the base model (PEFT: merge_and_unload) and save the result"
            )
    match = _FACTOR.fullmatch(name)
    if match is None:
        raise UnsupportedModel(f"the tensor {name!r} in {folder} is not a LoRA factor")
    return match[1], match[2]


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in float32."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / TENSORS
    if not path.is_file():
        other = [file.name for file in adapter_files(folder) if file.name != CONFIG]
        hint = f"; save {other[0]} as safetensors" if other else ""
        raise CorruptModel(f"{folder} has no {TENSORS}{hint}")
    try:
        found = load_file(str(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise CorruptModel(f"{path} is cut off or damaged: {error}") from error
    for name, tensor in found.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModel(f"the tensor {name!r} in {path} is of type {tensor.dtype}")
    converted = {name: tensor.to(torch.float32) for name, tensor in found.items()}
    weights.check_finite(converted)
    return converted
