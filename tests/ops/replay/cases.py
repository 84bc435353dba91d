"""Passes that are recorded for replay: every kernel, int8 and int4, several numbers of rows."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from outstride.core.graph import NodeId, chain, tree
from outstride.core.host_library import address
from outstride.core.proposal import Wants
from outstride.core.sampling import SamplingSpec
from outstride.models import lora
from outstride.models.decoder import Decoder
from outstride.models.experts import Experts
from outstride.ops.cpu import Cpu, native
from outstride.ops.cpu.int4 import GROUP
from outstride.ops.cpu.int8 import Int8Matrix
from outstride.ops.matrix_rows import BLOCK_KINDS, DEQUANTIZED_KINDS
from outstride.ops.routing import Routing
from tests.models.drive import Hand, random_decoder, tiny, tokens
from tests.models.lora_files import linear_shapes, write_lora
from tests.models.test_adapters import adapted, canvas
from tests.ops.replay.recording import Recording, RecordingLibrary

PORTABLE = native.ISAS.index("portable")
SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "odd sizes": {"hidden_size": 40, "intermediate_size": 51, "head_dim": 12, "vocab_size": 101},
    "norms and biases": {
        "head_norms": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "windows": (5, None),
        "layers": 2,
    },
    "experts": {
        "experts": Experts((True, True), 6, 64, Routing(2, normalized=True), shared=16, bias=True),
        "hidden_size": 64,
    },
    "experts of odd sizes": {
        "experts": Experts((False, True), 5, 20, Routing(3), shared=24, shared_gate=True),
        "head_norms": True,
        "wide_norms": True,
        "clip": 0.9,
    },
    "long heads": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "layers": 1},
}
BYTES_PER_GROUP = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 18, "Q6_K": 27, "Q8_0": 34}
"""At least: eight groups hold whole blocks."""
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 13)
SAMPLINGS = (
    SamplingSpec(),
    SamplingSpec(temperature=0.7, seed=3),
    SamplingSpec(temperature=0.8, top_p=0.9, seed=4, index=2),
    SamplingSpec(temperature=1.3, top_k=7, min_p=0.02, seed=2**63),
)


def passes(model: Decoder) -> None:
    """Prefill in chunks of several sizes, a draft tree, sampling, and a kept path."""
    hand = Hand(model, list(range(30)))
    for seed, chunk in enumerate(CHUNKS):
        hand.read(tokens(chunk, seed))
    end = len(hand.positions)
    parents = [-1, *((i - 1) // 3 for i in range(1, 22))]
    graph = tree(tokens(22, seed=5), parents, end)
    for sampling in SAMPLINGS:
        hand.run(graph, Wants(nodes=tuple(range(22)), best=3), sampling=sampling)
    hand.keep(graph, graph.path(NodeId(20)))
    hand.read(tokens(2, 9))


def long_context(model: Decoder) -> None:
    """Attention over more positions than one chunk of scores."""
    hand = Hand(model, list(range(50)))
    for _ in range(9):
        hand.read(tokens(64))
    hand.run(chain(tokens(3), len(hand.positions)))


def products(model: Decoder, library: Any) -> None:
    """Rows of a matrix whose sums are cut into slices, and KV that is written by hand."""
    ops = model.ops
    assert isinstance(ops, Cpu)
    rng = np.random.default_rng(1)
    matrix = Int8Matrix.of(rng.standard_normal((48, 4496)).astype(np.float32), None, 4496)
    ops.runtime.reserve_depth(4496)
    for rows in (1, 2, 3, 6, 9):
        ops.gemm.times(rng.standard_normal((rows, 4496)).astype(np.float32), matrix)
    shape, slots = ops.runtime.shape, np.asarray([3, 17, 16, 40])
    size = 4, shape.kv_heads, shape.head_dim
    keys, values = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    call = ops.runtime.calls[0]
    library.outstride_keep(call, address(slots), 4, address(keys), address(values))


def file_blocks(library: Any) -> None:
    """Rows of files to int4 and to float32: random blocks, with scales that are finite."""
    rng, groups = np.random.default_rng(2), 8
    for kind, name in enumerate(DEQUANTIZED_KINDS):
        rows = rng.integers(0, 256, (13, groups * BYTES_PER_GROUP[name]), dtype=np.uint8) & 0xBF
        addresses = (ctypes.c_void_p * 16)(*(address(row) for row in rows))
        floats = np.zeros((13, groups * GROUP), dtype=np.float32)
        library.outstride_dequantize(addresses, kind, 13, groups * GROUP, address(floats))
        if name in BLOCK_KINDS:
            data = np.zeros((groups + 1) * (64 + 16 * GROUP // 2), dtype=np.uint8)
            depth = (groups + 1) * GROUP
            library.outstride_repack_int4(addresses, kind, groups, 1, depth, address(data))


def record(path: Path) -> dict[str, int]:
    """Writes the recording; returns how often each kernel was called."""
    recording = Recording(path)
    library = RecordingLibrary(native.library(), recording)
    with patch.object(native, "library", lambda: library):
        make = partial(Cpu.of, isa=PORTABLE, count=1)
        for bits in (8, 4):
            for changes in SHAPES.values():
                passes(random_decoder(tiny(**changes), make_ops=partial(make, bits=bits)))
        model = random_decoder(tiny(**SHAPES["long heads"]), make_ops=make)
        long_context(model)
        products(model, library)
        file_blocks(library)
        model = random_decoder(tiny(), make_ops=make)
        spec = adapted(model, path.parent / "adapter")
        Hand(model, list(range(9))).run(canvas(spec.token, 0, 2))
        write_lora(path.parent / "lora", linear_shapes(model.config), r".*\.(q|down)_proj")
        found = lora.read(path.parent / "lora", model.config)
        model.attach_adapter("x", found.digest, found.layers)
        Hand(model, list(range(9)), adapter="x").read(tokens(12), 4)
    recording.close()
    return recording.calls
