"""Makes the golden logits with the code that was published with each diffusion model.

That code is not part of this project. Put the files into one folder that is a package (with an
empty `__init__.py`) and name the folder; transformers 4.53 and einops must be installed:

    configuration_llada.py, modeling_llada.py            GSAI-ML/LLaDA-8B-Instruct
    configuration_lladamoe.py, modeling_lladamoe.py      inclusionAI/LLaDA-MoE-7B-A1B-Instruct
    configuration_llada2_moe.py, modeling_llada2_moe.py  inclusionAI/LLaDA2.0-mini
    configuration_dream.py, modeling_dream.py, generation_utils.py   Dream-org/Dream-v0-Instruct-7B
    configuration_sdar.py, modeling_sdar.py              JetLM/SDAR-8B-Chat
    configuration.py, modeling.py                        Efficient-Large-Model/Fast_dLLM_v2_7B

They lie beside the weights on the model hub; copies are in the GitHub repositories ZHZisZZ/dllm
(LLaDA, LLaDA-MoE, LLaDA2, Dream) and JetAstra/SDAR. The file generate.py of the GitHub repositories
ML-GSAI/LLaDA and JetAstra/SDAR is needed too, as generate_llada.py and generate_sdar.py. From the
root of this project:

    PYTHONPATH=. python tests/models/golden/make.py FOLDER
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache

from tests.models.published import BLOCK, CONFIGS, MASK, canvas, prompts, rows, tensors, text

HALF = 20
"""Tokens that are cached before a block is scored behind them."""


def without_kernels(package: str) -> None:
    """SDAR's code calls GPU kernels; these compute the same in plain torch."""
    import transformers.modeling_utils  # noqa: F401 - looks for the real ones, and must not find these

    def norm(x: Any, weight: Any, bias: None, eps: float) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def attend(q: Any, k: Any, v: Any, *, causal: bool, softmax_scale: float) -> Any:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return found.transpose(1, 2)

    for name, values in (
        ("flash_attn", {"flash_attn_func": attend, "flash_attn_varlen_func": None}),
        (
            "flash_attn.bert_padding",
            dict.fromkeys(("index_first_axis", "pad_input", "unpad_input")),
        ),
        ("flash_attn.ops", {}),
        ("flash_attn.ops.triton", {}),
        ("flash_attn.ops.triton.layer_norm", {"rms_norm_fn": norm}),
        (
            f"{package}.fused_linear_diffusion_cross_entropy",
            {"FusedLinearDiffusionCrossEntropyLoss": None},
        ),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module


def load(package: str, family: str) -> Any:
    """The published model with the tiny checkpoint in it; every tensor must find its place."""
    config = {key: value for key, value in CONFIGS[family].items() if key != "model_type"}

    def take(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    if family == "llada":
        made = take("configuration_llada", "LLaDAConfig")(**config)
        code = importlib.import_module(f"{package}.modeling_llada")
        inner = code.LLaDAModel(code.create_model_config_from_pretrained_config(made))
        model = code.LLaDAModelLM(made, model=inner)
    else:
        file, kind, name = {
            "lladamoe": ("_lladamoe", "LLaDAMoEConfig", "LLaDAMoEModelLM"),
            "llada2_moe": ("_llada2_moe", "LLaDA2MoeConfig", "LLaDA2MoeModelLM"),
            "Dream": ("_dream", "DreamConfig", "DreamModel"),
            "sdar": ("_sdar", "SDARConfig", "SDARForCausalLM"),
            "Fast_dLLM_Qwen": ("", "Fast_dLLM_QwenConfig", "Fast_dLLM_QwenForCausalLM"),
        }[family]
        made = take(f"configuration{file}", kind)(**config)
        made._attn_implementation = "sdpa"
        model = take(f"modeling{file}", name)(made)
    state = {key: torch.from_numpy(value) for key, value in tensors(family).items()}
    if CONFIGS[family].get("tie_word_embeddings"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def see(count: int, block: int) -> torch.Tensor:
    """[1, 1, count, count]: each block sees itself and those before it."""
    numbers = torch.arange(count) // block
    return (numbers[:, None] >= numbers)[None, None]


def bidirectional(model: Any, family: str) -> dict[str, torch.Tensor]:
    mask = ("full",) if family == "Dream" else ()
    cases = {"text": text(family), "canvas": canvas(family)}
    return {case: model(torch.tensor([ids]), *mask).logits[0] for case, ids in cases.items()}


def llada2(model: Any, family: str) -> dict[str, torch.Tensor]:
    def ask(ids: list[int]) -> Any:
        mask = torch.zeros(1, 1, len(ids), len(ids)).masked_fill(~see(len(ids), BLOCK), -1e30)
        return model(torch.tensor([ids]), attention_mask=mask).logits[0]

    return {
        "text": ask(text(family)),
        "canvas": ask(canvas(family)),
        "block": ask(canvas(family)[: HALF + BLOCK])[HALF:],
    }


def sdar(model: Any, family: str) -> dict[str, torch.Tensor]:
    def ask(ids: list[int], block: int = BLOCK, **more: Any) -> Any:
        return model(torch.tensor([ids]), attention_mask=see(len(ids), block), **more).logits[0]

    cache = DynamicCache()
    ask(text(family)[:HALF], past_key_values=cache, use_cache=True, store_kv=True)
    behind = model(
        torch.tensor([canvas(family)[HALF : HALF + BLOCK]]),
        attention_mask=see(HALF + BLOCK, BLOCK)[:, :, HALF:],
        past_key_values=cache,
        use_cache=True,
        store_kv=False,
    ).logits[0]
    return {
        "text": ask(text(family)),
        "canvas": ask(canvas(family)),
        "block": behind,
        "causal": ask(text(family), 1),
    }


def fast(model: Any, family: str) -> dict[str, torch.Tensor]:
    def ask(ids: list[int], **more: Any) -> Any:
        return model(torch.tensor([ids]), **{"block_size": BLOCK, **more})

    kept = ask(text(family)[:HALF], use_cache=True, update_past_key_values=True)
    behind = ask(
        canvas(family)[HALF : HALF + BLOCK], use_cache=True, past_key_values=kept.past_key_values
    )
    return {
        "text": ask(text(family)).logits[0],
        "canvas": ask(canvas(family)).logits[0],
        "block": behind.logits[0],
        "causal": ask(text(family), block_size=1).logits[0],
    }


def answer(package: str, model: Any, family: str, prompt: list[int], count: int) -> list[int]:
    """What the published code writes: greedily, and one token per pass, the surest first."""
    ids = torch.tensor([prompt])
    if family in ("llada", "lladamoe"):
        code = importlib.import_module(f"{package}.generate_llada")
        whole = code.generate(
            model, ids, steps=count, gen_length=count, block_length=BLOCK, mask_id=MASK
        )
    elif family == "Dream":
        code = importlib.import_module(f"{package}.generation_utils")
        settings = code.DreamGenerationConfig(
            max_new_tokens=count,
            steps=64 * count,  # enough steps, and an end near zero, so that none settles two tokens
            eps=-1e-5,
            alg="maskgit_plus",
            mask_token_id=MASK,
        )
        whole = model.diffusion_generate(ids, generation_config=settings)
    elif family == "sdar":
        code = importlib.import_module(f"{package}.generate_sdar")
        with patch.object(torch, "multinomial", lambda p, num_samples: p.argmax(-1, keepdim=True)):
            whole = code.block_diffusion_generate(
                model,
                {"input_ids": ids},
                MASK,
                gen_length=count,
                block_length=BLOCK,
                denoising_steps=BLOCK,
                remasking_strategy="low_confidence_static",
            )
    elif family == "Fast_dLLM_Qwen":
        whole = model.generate(
            ids,
            max_new_tokens=count + BLOCK,
            mask_id=MASK,
            threshold=1,
            small_block_size=BLOCK,
            block_size=BLOCK,
            stop_token=-1,
        )
    else:
        forward = model.forward

        def wider(ids: Any, attention_mask: Any, position_ids: Any) -> Any:
            """Its masks are made in bfloat16, the type of its weights."""
            return forward(ids, attention_mask=attention_mask.float(), position_ids=position_ids)

        model.forward = wider
        whole = model.generate(
            ids,
            block_length=BLOCK,
            steps=BLOCK,
            gen_length=count,
            threshold=2.0,
            eos_id=-1,
            mask_id=MASK,
        )
        model.forward = forward
        return list(whole[0].tolist())
    return list(whole[0, len(prompt) : len(prompt) + count].tolist())


def main(folder: Path) -> None:
    sys.path.insert(0, str(folder.parent))
    transformers.utils.TransformersKwargs = (
        transformers.utils.LossKwargs
    )  # its name in LLaDA2's time
    ways = {"llada2_moe": llada2, "sdar": sdar, "Fast_dLLM_Qwen": fast}
    answers: dict[str, list[list[int]]] = {}
    for family in CONFIGS:
        if family == "sdar":
            without_kernels(folder.name)
        model = load(folder.name, family)
        with torch.inference_mode():
            found = ways.get(family, bidirectional)(model, family)
        kept = {name: logits[rows(len(logits))].numpy() for name, logits in found.items()}
        assert all(np.isfinite(values).all() and values.std() > 0.5 for values in kept.values())
        np.savez(Path(__file__).parent / f"{family}.npz", **kept)  # type: ignore[arg-type]
        with torch.inference_mode():
            asked = prompts(family)
            answers[family] = [answer(folder.name, model, family, *each) for each in asked]
        assert not any(MASK in found for found in answers[family])
        print(family, {name: values.shape for name, values in kept.items()}, answers[family])
    text_file = Path(__file__).parent / "answers.json"
    text_file.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
