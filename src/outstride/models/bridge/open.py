"""Opens a checkpoint folder with transformers, and refuses what cannot run over token graphs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.bridge.attention import NAME, handled_by, register
from outstride.models.bridge.invariant import ROWS
from outstride.models.bridge.probe import AttentionShape, Probe
from outstride.models.weights import check_finite

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_OTHER_ATTENTION = "its layers do not use the attention interface of transformers"
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def open_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The model of a folder in float32, ready to run with our attention.

    Raises UnsupportedModel if transformers is not installed, does not know the architecture, or needs
    code of the folder that is not trusted; CorruptModel if weights are missing or not finite.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedModel(
            "transformers may know it: pip install outstride[transformers]"
        ) from error
    register()
    with _quiet():
        config = _config(transformers, folder, trust_remote_code)
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=NAME,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                experts_implementation="eager",
            )
        except KeyError as error:
            if error.args == (NAME,):
                raise UnsupportedModel(_OTHER_ATTENTION) from error
            raise UnsupportedModel(f"transformers cannot run it: {_line(error)}") from error
        except (ValueError, ImportError, AttributeError, TypeError) as error:
            raise UnsupportedModel(f"transformers cannot run it: {_line(error)}") from error
        except (OSError, RuntimeError) as error:
            raise CorruptModel(f"transformers cannot load {folder}: {_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(kind) or ())):
            raise CorruptModel(f"{folder}: the tensor {names[0]!r} is missing or of another shape")
    check_finite(dict(model.named_parameters()))
    return model.float().eval().requires_grad_(False)


def _config(transformers: Any, folder: Path, trust_remote_code: bool) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                "it needs Python code of its repository; to run that code, pass "
                "--trust-remote-code (LLM(..., trust_remote_code=True)), if you trust its authors"
            ) from error
        raise UnsupportedModel(f"transformers does not know it: {_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder model, not a causal one")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel("through transformers, quantized checkpoints do not run")
    return config


def _line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the notices of transformers away: what matters is raised as an error."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def context_of(config: Any) -> int:
    """The context length of a model."""
    for key in _CONTEXT_KEYS:
        if isinstance(found := getattr(config, key, None), int) and found > 0:
            return found
    raise UnsupportedModel(f"config.json does not state a context length ({_CONTEXT_KEYS[0]})")


def layers_of(model: Any) -> list[AttentionShape]:
    """What each layer asks of attention, from a probe pass.

    Raises UnsupportedModel, with the reason, for models that cannot run over token graphs.
    """
    _check_modules(model)
    text = model.config.get_text_config(decoder=True)
    probe = Probe(ROWS, context_of(text))
    rows = torch.arange(ROWS)[None]
    try:
        with torch.inference_mode(), handled_by(probe), _quiet():
            found = model(input_ids=rows % text.vocab_size, position_ids=rows, use_cache=False)
    except UnsupportedModel:
        raise
    except TypeError as error:
        if "position_ids" in str(error):
            raise UnsupportedModel(
                "it takes no positions: it derives them from the cache length or from a bias (ALiBi)"
            ) from error
        raise UnsupportedModel(f"the probe pass failed: {_line(error)}") from error
    except Exception as error:  # code of the model: anything may be raised
        raise UnsupportedModel(f"the probe pass failed: {_line(error)}") from error
    if tuple(found.logits.shape[:2]) != (1, ROWS):
        raise UnsupportedModel(f"it gives logits of shape {tuple(found.logits.shape)}")
    expected = getattr(text, "num_hidden_layers", None)
    if len(probe.layers) != expected:
        raise UnsupportedModel(
            f"its {expected} layers attend {len(probe.layers)} times through the attention interface "
            "of transformers; each must do so once (others keep a state of their own)"
        )
    return probe.layers


def _check_modules(model: Any) -> None:
    """Raises UnsupportedModel for modules that mix rows other than by attention."""
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel("it keeps a recurrent state")
    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    for name, module in model.named_modules():
        if isinstance(module, convolutions):
            raise UnsupportedModel(f"it has a convolution over tokens ({name})")
        if isinstance(module, torch.nn.RNNBase):
            raise UnsupportedModel(f"it has a recurrent layer ({name})")
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _BATCH_DEPENDENT_ROPE:
                raise UnsupportedModel(
                    f"its RoPE ({kind}) depends on the longest position of a batch"
                )
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(_OTHER_ATTENTION)
