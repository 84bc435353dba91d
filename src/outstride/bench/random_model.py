"""Writes a GGUF file with random weights, to measure models of sizes that nobody has to download.

`python -m outstride.bench.random_model --out FILE --parameters 1b` writes about 0.7 GB in a few
seconds, with a tokenizer that is copied from another GGUF file (the default model's). Linear layers
are Q4_1 and the embedding, which is also the LM head, is Q8_0, as in the default model. The blocks
are random themselves: codes are uniform and scales are chosen so that activations keep their size
from layer to layer. Tensors are written one by one, so memory stays below the largest of them.

`--parameters 30b-a3b --layers 2` writes the first layers of a mixture of experts of the shape of
Qwen3-30B-A3B, with routers in F32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.errors import InvalidParams
from outstride.models.gguf_file import GgufFile

Blocks = npt.NDArray[np.uint8]

GROUP = 32
"""Weights per block of Q4_1 and Q8_0."""
Q4_1_STD, Q8_0_STD = (15 * 17 / 12) ** 0.5, (255 * 257 / 12) ** 0.5
"""Standard deviations of uniform codes."""
EMBEDDING_STD = 0.05
"""Gives logits of standard deviation 2 with a hidden size of 2,048."""


@dataclass(frozen=True, slots=True)
class RandomModelShape:
    """Sizes of a model of the Llama family whose LM head is its embedding.

    experts: how many each layer has (the family is Qwen3-MoE then), of which a token uses `used`;
    `intermediate` is the inner size of one. head_dim: 0 for the hidden size divided by the heads.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int = 8192
    experts: int = 0
    used: int = 0
    head_dim: int = 0

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    def linear(self) -> dict[str, tuple[int, ...]]:
        """Linear layers of a decoder layer by name: [outputs, inputs], or one for each expert."""
        query, key_value = self.head_size * self.heads, self.head_size * self.kv_heads
        found: dict[str, tuple[int, ...]] = {
            "attn_q": (query, self.hidden),
            "attn_k": (key_value, self.hidden),
            "attn_v": (key_value, self.hidden),
            "attn_output": (self.hidden, query),
        }
        end, each = ("_exps", (self.experts,)) if self.experts else ("", ())
        found[f"ffn_gate{end}"] = (*each, self.intermediate, self.hidden)
        found[f"ffn_up{end}"] = (*each, self.intermediate, self.hidden)
        found[f"ffn_down{end}"] = (*each, self.hidden, self.intermediate)
        return found


SHAPES = {
    "1b": RandomModelShape(2048, 16, 32, 8, 8192),
    "30b-a3b": RandomModelShape(2048, 48, 32, 4, 768, experts=128, used=8, head_dim=128),
}


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor of the file: name, [outputs, inputs] or [size], and its type in GGUF's words."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of its data in the file: bytes of blocks, or floats."""
        size = {"Q4_1": 20, "Q8_0": 34}.get(self.kind)
        if size is None:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // GROUP * size)


def tensors(shape: RandomModelShape, vocabulary: int) -> Iterator[RandomTensor]:
    """All tensors in the order of the file."""
    yield RandomTensor("token_embd.weight", (vocabulary, shape.hidden), "Q8_0")
    for layer in range(shape.layers):
        yield RandomTensor(f"blk.{layer}.attn_norm.weight", (shape.hidden,), "F32")
        yield RandomTensor(f"blk.{layer}.ffn_norm.weight", (shape.hidden,), "F32")
        if shape.experts:
            yield RandomTensor(f"blk.{layer}.attn_q_norm.weight", (shape.head_size,), "F32")
            yield RandomTensor(f"blk.{layer}.attn_k_norm.weight", (shape.head_size,), "F32")
            router = (shape.experts, shape.hidden)
            yield RandomTensor(f"blk.{layer}.ffn_gate_inp.weight", router, "F32")
        for name, size in shape.linear().items():
            yield RandomTensor(f"blk.{layer}.{name}.weight", size, "Q4_1")
    yield RandomTensor("output_norm.weight", (shape.hidden,), "F32")


def _scales(numbers: np.random.Generator, shape: tuple[int, ...], std: float) -> Any:
    """One fp16 scale per block, of mean `std`; they differ, as in files of trained weights."""
    return (std * numbers.uniform(0.5, 1.5, size=(*shape, 1))).astype("<f2")


def random_blocks(tensor: RandomTensor, numbers: np.random.Generator) -> Any:
    """Data of a tensor: ones for norms, random numbers for routers, else random blocks as bytes."""
    if tensor.kind == "F32":
        if len(tensor.shape) == 1:
            return np.ones(tensor.shape, dtype="<f4")
        return numbers.standard_normal(tensor.shape, dtype="<f4") * tensor.shape[-1] ** -0.5
    rows, columns = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
    groups = (rows, columns // GROUP)
    if tensor.kind == "Q8_0":
        scales = _scales(numbers, groups, EMBEDDING_STD / Q8_0_STD)
        codes: Blocks = np.frombuffer(numbers.bytes(rows * columns), dtype=np.uint8)
        parts = [scales.view(np.uint8), codes.reshape(*groups, GROUP)]
    else:
        scales = _scales(numbers, groups, columns**-0.5 / Q4_1_STD)
        minima = (scales.astype(np.float32) * -7.5).astype("<f2")  # codes 0 to 15 have mean 7.5
        codes = np.frombuffer(numbers.bytes(rows * columns // 2), dtype=np.uint8)
        parts = [scales.view(np.uint8), minima.view(np.uint8), codes.reshape(*groups, GROUP // 2)]
    return np.concatenate(parts, axis=-1).reshape(tensor.stored)


def _copy(writer: Any, key: str, value: Any) -> None:
    """Adds a value of another file's metadata."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def write(path: Path, shape: RandomModelShape, source: Path, seed: int = 0) -> int:
    """Writes a model with the tokenizer of `source`, a GGUF file; returns its number of weights."""
    from gguf import GGMLQuantizationType, GGUFWriter

    if shape.hidden % GROUP or shape.head_size % GROUP or shape.intermediate % GROUP:
        raise InvalidParams(f"sizes of heads and layers must be multiples of {GROUP}")
    other = GgufFile(source)
    vocabulary = len(other.metadata["tokenizer.ggml.tokens"])
    writer = GGUFWriter(path, "qwen3moe" if shape.experts else "llama")
    writer.add_name(f"random weights, seed {seed}")
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_size)
    if shape.experts:
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in other.metadata.items():
        if key.startswith("tokenizer."):
            _copy(writer, key, value)
    listed = list(tensors(shape, vocabulary))
    for tensor in listed:
        kind = GGMLQuantizationType[tensor.kind]
        size = int(np.prod(tensor.stored)) * (4 if tensor.kind == "F32" else 1)
        dtype = np.dtype(np.float32 if tensor.kind == "F32" else np.uint8)
        writer.add_tensor_info(tensor.name, tensor.stored, dtype, size, kind)
    numbers = np.random.default_rng(seed)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in listed:
            writer.write_tensor_data(random_blocks(tensor, numbers))
    finally:
        writer.close()
    return sum(int(np.prod(tensor.shape)) for tensor in listed)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    from outstride.models.load import locate

    parser = argparse.ArgumentParser(
        prog="python -m outstride.bench.random_model",
        description="Writes a GGUF file with random weights (Q4_1; embedding Q8_0).",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--parameters", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--tokenizer",
        default="smollm2",
        metavar="MODEL",
        help="model whose GGUF file has the tokenizer (default smollm2)",
    )
    args = parser.parse_args(arguments)
    source = locate(args.tokenizer)
    if source.suffix != ".gguf":
        parser.error(f"{args.tokenizer} is not a GGUF file, so its tokenizer cannot be copied")
    shape = SHAPES[args.parameters]
    shape = replace(shape, layers=min(args.layers or shape.layers, shape.layers))
    count = write(args.out, shape, source, args.seed)
    print(f"{args.out}: {count / 1e9:.2f} billion weights, {args.out.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
