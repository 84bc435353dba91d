"""From hidden states to tokens: the LM head, and sampling."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import numpy as np

from outstride.core.graph import FloatArray, IntArray
from outstride.core.host_library import address
from outstride.core.proposal import Proposal, Scores
from outstride.core.scoring import select
from outstride.ops.contract import HeadInput
from outstride.ops.cpu import native
from outstride.ops.cpu.gemm import Gemm
from outstride.ops.cpu.runtime import Runtime
from outstride.ops.cpu.workspace import as_slice

LM_HEAD_ROWS = 64
"""How many rows of logits exist at once, however many nodes are wanted: it bounds memory."""


class SamplingPath(enum.Enum):
    """Where the tokens of a row are chosen."""

    GREEDY = enum.auto()
    """Inside the LM head kernel: no logits are written."""
    SAMPLED = enum.auto()
    """By the sampling kernel, from logits."""
    HOST = enum.auto()
    """In Python, from logits: what the kernels do not know."""


def sampling_path(item: HeadInput) -> SamplingPath:
    """By what the request wants, so that one request always takes one path."""
    proposal, wants = item.proposal, item.proposal.wants
    if proposal.processors or wants.logprobs is not None or wants.rows or wants.logits:
        return SamplingPath.HOST
    if proposal.sampling.temperature == 0.0 and wants.best <= native.MAX_FUSED:
        return SamplingPath.GREEDY
    return SamplingPath.SAMPLED if wants.best <= native.MAX_BEST else SamplingPath.HOST


class Sampler:
    """Scores of the target's nodes, at most LM_HEAD_ROWS rows of logits at a time."""

    def __init__(self, runtime: Runtime, gemm: Gemm) -> None:
        self._runtime, self._gemm = runtime, gemm
        # Buffers that are used again and again: new memory is slow to come by.
        self._logits = np.empty(0, dtype=np.float32)
        self._scaled = np.empty(0, dtype=np.float32)
        self._order = np.empty(0, dtype=native.BEST)

    def score(self, wanted: Sequence[HeadInput], results: list[list[Scores]]) -> None:
        """Appends to `results` the scores of all nodes that do not belong to draft heads."""
        by_path: dict[SamplingPath, list[tuple[int, IntArray]]] = {}
        for i, item in enumerate(wanted):
            if not item.proposal.draft_head and len(item.nodes):
                by_path.setdefault(sampling_path(item), []).append((i, item.nodes))
        for path, listed in by_path.items():
            for portion in portions(listed, LM_HEAD_ROWS):
                self._score_portion(path, wanted, portion, results)

    def _score_portion(
        self,
        path: SamplingPath,
        wanted: Sequence[HeadInput],
        portion: list[tuple[int, IntArray]],
        results: list[list[Scores]],
    ) -> None:
        """Scores nodes of some proposals, each given by its index in `wanted`."""
        weights, shape, gemm = self._runtime.weights, self._runtime.shape, self._gemm
        size = shape.hidden_size
        hidden = [hidden_rows(wanted[i], nodes) for i, nodes in portion]
        x = hidden[0] if len(hidden) == 1 else np.concatenate(hidden)
        best, logits = np.zeros((0, 0), dtype=np.int64), self._logits
        if path is SamplingPath.GREEDY:
            top_k = max(wanted[i].proposal.wants.best for i, _ in portion)
            best, _ = gemm.normed_highest(x, weights.norm, weights.vocabulary, size, top_k)
        else:
            keep = any(wanted[i].proposal.wants.logits for i, _ in portion)
            buffer = None if keep else self._logits_buffer(len(x))
            logits = gemm.normed_times(x, weights.norm, weights.vocabulary, size, buffer)
        if path is SamplingPath.SAMPLED:
            asked = [(wanted[i].proposal, n) for i, nodes in portion for n in nodes.tolist()]
            best = self.sample(asked, logits)
        start = 0
        for i, nodes in portion:
            rows, proposal = slice(start, start + len(nodes)), wanted[i].proposal
            start += len(nodes)
            if path is SamplingPath.HOST:
                found = select(proposal, nodes, logits[rows, : shape.vocab_size])
            else:
                found = Scores(nodes, best[rows, : max(1, proposal.wants.best)])
            results[i].append(found)

    def _logits_buffer(self, count: int) -> FloatArray:
        """Room for this many rows of logits."""
        if self._logits.size < (needed := count * self._runtime.weights.vocabulary.stride):
            self._logits = np.empty(needed, dtype=np.float32)
        return self._logits

    def sample(self, asked: list[tuple[Proposal, int]], logits: FloatArray) -> IntArray:
        """[rows, k]: the tokens of each row of logits [rows, stride], as `core.sampling` chooses them.

        asked: the proposal and the node of each row.
        """
        runtime = self._runtime
        count, stride = logits.shape
        k = max(max(1, proposal.wants.best) for proposal, _ in asked)
        specs = np.zeros(count, dtype=native.SAMPLING_SPEC)
        for line, (proposal, node) in zip(specs, asked, strict=True):
            spec = proposal.sampling
            line["seed"], line["index"], line["purpose"] = spec.seed, spec.index, spec.purpose
            line["position"] = int(proposal.graph.positions[node]) + proposal.offset
            line["top_k"], line["top_p"] = spec.top_k, spec.top_p
            line["temperature"], line["min_p"] = spec.temperature, spec.min_p
            line["log_min_p"] = np.log(spec.min_p) if spec.min_p > 0 else 0.0
        if self._scaled.size < runtime.threads * stride:
            self._scaled = np.empty(runtime.threads * stride, dtype=np.float32)
            self._order = np.empty(runtime.threads * stride, dtype=native.BEST)
        out = np.empty((count, k), dtype=np.int32)
        runtime.lib.outstride_choose(
            runtime.engine,
            native.SampleStruct(
                address(logits),
                address(specs),
                address(self._scaled),
                address(self._order),
                address(out),
                count,
                stride,
                runtime.shape.vocab_size,
                k,
            ),
        )
        return out.astype(np.int64)


def hidden_rows(item: HeadInput, nodes: IntArray) -> FloatArray:
    """[nodes, width]: hidden states, without a copy where nodes are consecutive, as they mostly are."""
    found: FloatArray = item.hidden[as_slice(nodes - item.first if item.first else nodes)]
    return found


def portions(
    listed: list[tuple[int, IntArray]], limit: int
) -> Iterator[list[tuple[int, IntArray]]]:
    """The nodes of all owners in portions of at most `limit`; those of one owner may be split."""
    portion: list[tuple[int, IntArray]] = []
    left = limit
    for owner, nodes in listed:
        while len(nodes) > left:
            if left:
                portion.append((owner, nodes[:left]))
            yield portion
            nodes, portion, left = nodes[left:], [], limit
        portion.append((owner, nodes))
        left -= len(nodes)
    if portion:
        yield portion
