"""The recipe of `parallel-full` and `parallel-block`: two small masked models.

    python -m outstride.train.parallel full --out FOLDER --steps 10487
    python -m outstride.train.parallel block --out FOLDER --steps 5807

Both learn the list tasks of `models.shipped.lists` from scratch. The full model attends to its whole
canvas and is saved as a LLaDA checkpoint. The block model attends in blocks of 16, is saved as an
SDAR checkpoint, and learns autoregressive decoding as well. These commands made the shipped weights,
side by side on one H200 in three minutes. The training is a function of the seed, the workers (8
each) and the number of steps, up to the rounding of the device; `--seconds` chooses that number by
timing a few steps first, and prints it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as fn

from outstride.models.checkpoint_names import published
from outstride.models.config import DecoderConfig
from outstride.models.shipped.lists import END, MASK, TASKS, UNKNOWN, VOCABULARY, cases
from outstride.train.layers import LayerShape, Pair, layer, norm, rope_tables, within
from outstride.train.list_tasks import IDS, TaskTexts, masked_examples
from outstride.train.loop import StepRate, advance, optimizer_of, rate_at, seconds_per_step

Weights = dict[str, torch.Tensor]
BLOCK = 16
LENGTHS = {"full": 40, "block": 32}
"""Positions of a training text; the longest question with its answer has 30."""

_CONTEXT, _WIDTH, _INNER, _LAYERS, _HEADS = 2048, 160, 384, 4, 5
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": _WIDTH,
        "n_heads": _HEADS,
        "n_kv_heads": _HEADS,
        "n_layers": _LAYERS,
        "mlp_hidden_size": _INNER,
        "max_sequence_length": _CONTEXT,
        "vocab_size": len(VOCABULARY),
        "embedding_size": len(VOCABULARY),
        "activation_type": "silu",
        "block_type": "llama",
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 10000.0,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "bias_for_layer_norm": False,
        "weight_tying": False,
        "mask_token_id": IDS[MASK],
        "eos_token_id": IDS[END],
    },
    "block": {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": len(VOCABULARY),
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _WIDTH // _HEADS,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "mask_token_id": IDS[MASK],
        "eos_token_id": IDS[END],
    },
}


# --- the model --------------------------------------------------------------------------------------


def fresh(config: DecoderConfig, seed: int) -> Weights:
    """Untrained weights under their common names."""
    numbers = torch.Generator().manual_seed(seed)
    result: Weights = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            result[name] = torch.ones(shape)
            continue
        spread = 0.02 if name.startswith(("model.embed", "lm_head")) else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            spread /= math.sqrt(2 * config.layers)
        result[name] = spread * torch.randn(shape, generator=numbers)
    return result


def forward(
    config: DecoderConfig, weights: Weights, tokens: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Logits of a batch of texts; mask: which position sees which, [texts, length, length]."""
    rope = rope_tables(config, tokens.shape[1], str(tokens.device))
    return _forward(LayerShape.of(config), config.layers, weights, rope, tokens, mask)


def _forward(
    shape: LayerShape,
    layers: int,
    weights: Weights,
    rope: Pair,
    tokens: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """`forward` in a form that torch can compile."""
    x = fn.embedding(tokens, weights["model.embed_tokens.weight"])
    for i in range(layers):
        x = layer(shape, within(weights, f"model.layers.{i}."), x, rope, mask[:, None])
    return fn.linear(norm(x, weights["model.norm.weight"], shape.eps), weights["lm_head.weight"])


# --- the training -----------------------------------------------------------------------------------


def loss_of(scores: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The mean over texts of the mean over their masks."""
    each = fn.cross_entropy(scores.float().transpose(1, 2), targets, reduction="none")
    counts = counted.sum(1)
    total = (each * counted).sum(1) / counts.clamp(min=1)
    return total.sum() / (counts > 0).sum().clamp(min=1)


def train(
    kind: str,
    *,
    steps: int,
    seconds: float = 0.0,
    batch: int = 2048,
    pool: int = 2_000_000,
    peak: float = 2e-3,
    seed: int = 1,
    device: str = "cpu",
    workers: int = 1,
    say: Callable[[str], None] = print,
) -> tuple[Weights, int]:
    """Trains one kind; with `seconds`, for about that long instead of a number of steps.

    Returns the weights and the number of steps.
    """
    config = DecoderConfig.from_hf(CONFIGS[kind])
    block = config.diffusion.block if config.diffusion else None
    texts = TaskTexts.training(pool, LENGTHS[kind], seed, workers).to(device)
    say(
        f"{kind}: {len(texts.tokens)} texts, {sum(map(math.prod, config.shapes().values()))} weights"
    )
    weights = {name: value.to(device) for name, value in fresh(config, seed).items()}
    fast = device != "cpu"
    shape, layers = LayerShape.of(config), config.layers
    rope = rope_tables(config, LENGTHS[kind], device)

    def measure(
        weights: Weights, tokens: torch.Tensor, mask: torch.Tensor, *right: torch.Tensor
    ) -> torch.Tensor:
        return loss_of(_forward(shape, layers, weights, rope, tokens, mask), *right)

    measured = torch.compile(measure) if fast else measure
    optimizer = optimizer_of(weights, decay=0.05, second=0.98)

    def step(rate: float, numbers: torch.Generator) -> torch.Tensor:
        rows = torch.randint(len(texts.tokens), (batch,), generator=numbers, device=device)
        given = masked_examples(texts.take(rows), block, numbers, blank=False)
        right = (given.targets, given.counted)
        return advance(
            lambda: measured(weights, given.tokens, given.mask, *right), weights, optimizer, rate
        )

    if seconds:
        other = torch.Generator(device).manual_seed(seed)
        steps = max(1, int(seconds / seconds_per_step(lambda: step(0.0, other))))
        optimizer = optimizer_of(weights, decay=0.05, second=0.98)  # it has learned nothing
        say(f"{kind}: {steps} steps")
    numbers = torch.Generator(device).manual_seed(seed)
    pace = StepRate(steps, every=5.0)
    for number in range(steps):
        loss = step(rate_at(number, steps, peak), numbers)
        if pace.due(number + 1):
            left = f"about {pace.left():.0f} s left"
            say(f"{kind}: step {number + 1} of {steps}, loss {loss.item():.4f}, {left}")
    return {name: value.detach() for name, value in weights.items()}, steps


@torch.no_grad()
def in_one_pass(kind: str, weights: Weights, count: int, device: str = "cpu") -> dict[str, float]:
    """By task, how often one pass fills all masks correctly (of the last block, where there are
    blocks).
    """
    config = DecoderConfig.from_hf(CONFIGS[kind])
    block = config.diffusion.block if config.diffusion else None
    numbers, found = torch.Generator(device).manual_seed(0), {}
    for name in TASKS:
        pairs = [(case.prompt, case.answer) for case in cases(name, count)]
        texts = TaskTexts.of(pairs, LENGTHS[kind]).to(device)
        given = masked_examples(texts, block, numbers, blank=True)
        predicted = forward(config, weights, given.tokens, given.mask).argmax(-1)
        found[name] = float(((predicted == given.targets) | ~given.counted).all(1).float().mean())
    return found


# --- what is left of it ------------------------------------------------------------------------------


def tokenizer_json() -> str:
    """The tokenizer of the tasks: one token per word."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pieces

    special = (UNKNOWN, END, MASK)
    vocabulary = {w if w in special else f"▁{w}": i for w, i in IDS.items()}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")]
    )
    backend.pre_tokenizer = pieces.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    backend.add_special_tokens([AddedToken(word, special=True) for word in special])
    return str(backend.to_str())


def save(kind: str, weights: Mapping[str, torch.Tensor], folder: Path, about: str) -> None:
    """A checkpoint folder in the published format, in half precision."""
    from safetensors.torch import save_file

    config = DecoderConfig.from_hf(CONFIGS[kind])
    tensors = {
        published(name, config.architecture): value.to("cpu", torch.float16).contiguous()
        for name, value in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt", "recipe": about})
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind], indent=1) + "\n")
    (folder / "tokenizer.json").write_text(tokenizer_json() + "\n", encoding="utf-8")
    named = {"eos_token": END, "mask_token": MASK, "unk_token": UNKNOWN}
    (folder / "tokenizer_config.json").write_text(json.dumps(named) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="outstride.train.parallel", description=__doc__)
    parser.add_argument("kind", choices=sorted(CONFIGS))
    parser.add_argument("--out", required=True, type=Path, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seconds", type=float, default=0.0, help="instead of steps: how long")
    parser.add_argument("--batch", type=int, default=2048, help="texts per step")
    parser.add_argument("--pool", type=int, default=2_000_000, help="different texts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", type=int, default=500, help="questions of each task at the end")
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    weights, steps = train(
        args.kind,
        steps=args.steps,
        seconds=args.seconds,
        batch=args.batch,
        pool=args.pool,
        seed=args.seed,
        device=device,
        workers=args.workers,
        say=lambda text: print(text, flush=True),
    )
    about = f"{args.kind}, seed {args.seed}, {steps} steps of {args.batch}, {args.pool} texts"
    save(args.kind, weights, args.out, about)
    for name, share in in_one_pass(args.kind, weights, args.check, device).items():
        print(f"{args.kind}: {name} all at once {share:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
