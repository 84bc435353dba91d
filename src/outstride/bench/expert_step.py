"""The time of one token of a mixture of experts against the time of reading its active weights.

`python -m outstride.bench.expert_step` makes a model of the shape of Qwen3-30B-A3B with few layers and
random packed weights, without a file. Every pass decodes a random token after a short prompt, so the
experts differ from pass to pass and come from memory. The baseline reads as many bytes of the same
memory on as many threads: a range that moves on with every run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.bench.clock import Series, timed
from outstride.core.contracts import PassInput
from outstride.core.graph import chain
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import BlockTable
from outstride.models.config import DecoderConfig, RopeConfig
from outstride.models.decoder import Decoder
from outstride.models.experts import Experts
from outstride.ops.cpu import Cpu
from outstride.ops.cpu.experts import Matrix
from outstride.ops.cpu.int4 import GROUP
from outstride.ops.cpu.int8 import Int8Matrix
from outstride.ops.cpu.weights import PackedModel
from outstride.ops.routing import Routing

PAGE, PROMPT = 16, 64
PORTION = 1 << 16
"""Words of 8 bytes that a thread reads at a time."""


def shape_of(layers: int, vocabulary: int = 4096) -> DecoderConfig:
    """Qwen3-30B-A3B with this many layers and a small vocabulary."""
    return DecoderConfig(
        architecture="qwen3_moe",
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=6144,
        layers=layers,
        heads=32,
        kv_heads=4,
        head_dim=128,
        context=4096,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        rope_layers=(True,) * layers,
        windows=(None,) * layers,
        head_norms=True,
        tied=True,
        experts=Experts((True,) * layers, 128, 768, Routing(8, normalized=True)),
    )


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """Seconds of a pass over one token and of the baseline, and what a pass reads."""

    build: str
    bits: int
    layers: int
    threads: int
    active_bytes: int
    token_best: float
    token_median: float
    read_best: float
    read_median: float

    @property
    def ratio(self) -> float:
        """The time of a token against that of reading its weights, both at their best.

        On a machine that others use, the best runs are those that were not disturbed.
        """
        return self.token_best / self.read_best

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": round(self.ratio, 3)}


def random_weights(config: DecoderConfig, bits: int, seed: int = 0) -> PackedModel:
    """A packed model whose codes are random; its activations keep their size."""
    optional = {"attention_norm", "mlp_norm", "query_norm", "key_norm", "experts.router"}
    model = PackedModel.reserve(config, bits, optional, tied=True)
    numbers = np.random.default_rng(seed)
    noise = np.frombuffer(numbers.bytes(1 << 24), dtype=np.uint8)
    for layer in model.layers:
        for name, vector in (("attention_norm", 1.0), ("mlp_norm", 1.0)):
            getattr(layer, name)[: config.hidden_size] = vector
        for norm in (layer.query_norm, layer.key_norm):
            assert norm is not None
            norm[:] = 1.0
        assert layer.experts is not None
        router = layer.experts.router
        router[:] = numbers.standard_normal(router.shape) * config.hidden_size**-0.5
        for matrix in (layer.qkv, layer.output, layer.experts.gate_up, layer.experts.down):
            _fill(matrix, noise)
    _fill(model.vocabulary, noise)
    model.norm[: config.hidden_size] = 1.0
    return model


def _fill(matrix: Matrix, noise: npt.NDArray[np.uint8]) -> None:
    """Random codes; scales such that a row of ones as activations has a result of about one."""
    data = matrix.data
    for start in range(0, data.size, noise.size):
        part = data[start : start + noise.size]
        part[:] = noise[: part.size]
    std = matrix.k**-0.5
    if isinstance(matrix, Int8Matrix):
        matrix.scale[:], matrix.zero[:] = std / 74, 128
        return
    blocks = data.reshape(matrix.tiles, matrix.depth // GROUP, -1)
    ends = np.empty((2, 16), dtype=np.float16)
    ends[0], ends[1] = std / 4.6, -7.5 * std / 4.6
    blocks[..., :64] = ends.view(np.uint8).reshape(-1)


def active_bytes(model: PackedModel, config: DecoderConfig) -> int:
    """What a pass over one token reads: all dense matrices, routers, and its experts."""
    assert config.experts is not None
    share = config.experts.routing.per_token / config.experts.count
    total = model.vocabulary.data.size
    for layer in model.layers:
        assert layer.experts is not None
        own = layer.experts
        total += layer.qkv.data.size + layer.output.data.size + own.router.nbytes
        total += int((own.gate_up.data.size + own.down.data.size) * share)
    return total


class _Reader:
    """Reads bytes of a block of memory, each time others; threads share a range by portions.

    A thread that is descheduled is not waited for longer than a portion takes, as in the kernels.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], size: int, threads: int) -> None:
        self._words = memory[: memory.size // 64 * 64].view(np.uint64)
        self._size, self._threads, self._at = size // 8, threads, 0
        self._pool = ThreadPoolExecutor(max(1, threads - 1))

    def __call__(self) -> None:
        if self._at + self._size > len(self._words):
            self._at = 0
        start, self._at = self._at, self._at + self._size
        portions = iter(range(start, self._at, PORTION))
        others = [self._pool.submit(self._read, portions) for _ in range(self._threads - 1)]
        self._read(portions)
        for other in others:
            other.result()

    def _read(self, portions: Iterator[int]) -> None:
        for at in portions:
            np.bitwise_or.reduce(self._words[at : at + PORTION])


def measure(
    config: DecoderConfig, bits: int, repeat: int, threads: int | None = None
) -> ExpertStep:
    """Times passes and reads in turns."""
    weights = random_weights(config, bits)
    ops = Cpu(config, weights, slots=64 * PAGE, page_size=PAGE, count=threads)
    model = Decoder(config, ops, "random", pages=64, page_size=PAGE)
    numbers = np.random.default_rng(1)
    table = BlockTable(list(range(64)), [], stale=0, ordered=True)

    def work(count: int) -> PassInput:
        first = len(table.positions)
        slots = np.arange(first, first + count)
        drawn = [int(token) for token in numbers.integers(config.vocab_size, size=count)]
        return PassInput(Proposal(chain(drawn, first), given=1, wants=Wants()), table, slots)

    model.forward([work(PROMPT)]).wait()
    table.positions.extend(range(PROMPT))
    size, count = active_bytes(weights, config), ops.runtime.threads
    experts = weights.layers[0].experts
    assert experts is not None
    reader = _Reader(experts.gate_up.data, size, count)
    tokens, reads = Series(), Series()
    for turn in range(repeat + 3):
        step: Callable[[], object] = partial(_wait, model, work(1))
        seconds, read = timed(step), timed(reader)
        if turn >= 3:  # the first ones start threads
            tokens.add(seconds)
            reads.add(read)
    return ExpertStep(
        build=ops.name,
        bits=bits,
        layers=config.layers,
        threads=count,
        active_bytes=size,
        token_best=tokens.best,
        token_median=tokens.median,
        read_best=reads.best,
        read_median=reads.median,
    )


def _wait(model: Decoder, item: PassInput) -> None:
    model.forward([item]).wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m outstride.bench.expert_step",
        description="One token of a mixture of experts against reading its active weights.",
        allow_abbrev=False,
    )
    parser.add_argument("--layers", type=int, default=2, metavar="N")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=4)
    parser.add_argument("--repeat", type=int, default=60, metavar="N")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="default: all cores")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    found = measure(shape_of(args.layers), args.bits, args.repeat, args.threads)
    if args.json:
        print(json.dumps(found.to_dict()))
        return
    megabytes = found.active_bytes / 1e6
    print(f"{found.build}, {found.layers} layers, {found.threads} threads")
    for name, best, median in (
        ("one token", found.token_best, found.token_median),
        ("reading its weights", found.read_best, found.read_median),
    ):
        print(
            f"{name}: best {best * 1e3:.2f} ms ({megabytes / best / 1e3:.1f} GB/s), "
            f"median {median * 1e3:.2f} ms"
        )
    print(f"ratio {found.ratio:.2f} (at their best)")


if __name__ == "__main__":
    main()
