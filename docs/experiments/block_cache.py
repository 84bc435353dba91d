"""What the exact cache of a block-diffusion model saves over computing the whole text in every pass.

    .venv/bin/python docs/experiments/block_cache.py

A small random model in blocks of 32 answers 32 tokens, one per pass, behind 1,024 tokens of context.
With the cache, a pass computes one block. Without it, each pass would read everything: such a pass
is timed with a context that is new to the cache, in turns with the cached answers. Takes about a
minute on two cores.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from safetensors.torch import save_file

from outstride import LLM, SamplingParams
from outstride.models.config import DecoderConfig
from outstride.train.parallel import CONFIGS, fresh, tokenizer_json

BLOCK, CONTEXT, ANSWER, ROUNDS = 32, 1024, 32, 3


def made(folder: Path) -> Path:
    """A random checkpoint of 5 million weights."""
    values = {
        **CONFIGS["block"],
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "block_size": BLOCK,
    }
    save_file(fresh(DecoderConfig.from_hf(values), 1), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return folder


def seconds(llm: LLM, prompt: list[int], count: int, salt: str) -> tuple[float, int, int]:
    """How long an answer took, its passes, and its nodes."""
    start = time.perf_counter()
    [answer] = llm.generate(
        prompt, SamplingParams(max_tokens=count, ignore_eos=True), method="steps", salt=salt
    )
    return time.perf_counter() - start, answer.stats.passes, answer.stats.nodes


def main() -> None:
    numbers = random.Random(0)
    prompt = [numbers.randrange(2, 70) for _ in range(CONTEXT)]
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(made(Path(folder)), max_nodes=2 * CONTEXT) as llm,
    ):
        seconds(llm, prompt, 1, "warm-up")
        cached, whole = [], []
        for turn in range(ROUNDS):
            cached.append(seconds(llm, prompt, ANSWER, f"cached {turn}"))
            whole.append(seconds(llm, prompt, 1, f"whole {turn}"))
        once = median(time for time, _, _ in whole)
        took = median(time for time, _, _ in cached)
        print(f"{llm.model.ops.name}: {CONTEXT} tokens of context, {ANSWER} of answer")
        print(f"with the cache      {took:.2f} s, {cached[0][1]} passes, {cached[0][2]} nodes")
        print(
            f"whole text each     {once * ANSWER:.2f} s ({once:.3f} s a pass), "
            f"{ANSWER} passes, {ANSWER * whole[0][2]} nodes"
        )
        print(f"ratio               {once * ANSWER / took:.1f}")


if __name__ == "__main__":
    main()
