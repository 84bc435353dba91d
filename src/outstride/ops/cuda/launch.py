"""`PassLauncher`: launches whole passes, from CUDA graphs once they have been seen before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]

from outstride.ops.contract import Span
from outstride.ops.cuda.batch_metadata import BatchMetadata
from outstride.ops.cuda.cuda_graph import CudaGraph
from outstride.ops.cuda.host_io import MetadataRing
from outstride.ops.cuda.kv_cache import DeviceKVCache
from outstride.ops.cuda.lm_head import DeviceLMHead, HiddenRows, SamplingKernels
from outstride.ops.cuda.metadata import ROW_SIZES, Int32Array
from outstride.ops.cuda.metadata_builder import MetadataBuilder
from outstride.ops.cuda.run_ahead.decode_steps import DecodeSteps
from outstride.ops.cuda.run_ahead.realign import realign

METADATA_SIZE = 1 << 16
"""Words of the metadata buffer, at first."""
MAX_GRAPH_ROWS = 1024
"""Passes of at most this many rows are captured: launching larger ones takes no time in comparison."""


@dataclass(slots=True)
class CudaBatch:
    """The spans of one pass, and its metadata, made when it is needed."""

    spans: Sequence[Span]
    windows: tuple[int | None, ...]
    rows: int
    """Padded."""
    mixtures: bool
    steps: DecodeSteps | None = None
    """Set if each span is one step of a sequence."""
    metadata: BatchMetadata | None = None

    def metadata_from(self, build: MetadataBuilder) -> BatchMetadata:
        """The metadata of the pass."""
        if self.metadata is None:
            geometry = build.geometry
            if self.rows <= ROW_SIZES[-1]:
                self.steps = DecodeSteps.of(self.spans, geometry.page_size)
            if self.steps is not None and len(self.steps) > 1:
                self.metadata = self.steps.metadata(self.windows, self.rows, geometry)
            else:
                self.metadata = build(self.spans, self.windows, self.rows)
        return self.metadata


@dataclass(frozen=True, slots=True)
class DeferredPass:
    """A whole pass that is launched when the LM head is asked for its scores."""

    layers: Callable[[], HiddenRows]
    """Launches the layers."""
    batch: CudaBatch
    layer_range: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Realignment:
    """What a pass needs that the GPU moves before it begins (see `run_ahead.realign`)."""

    best: torch.Tensor
    """The tokens that the target sampled last."""
    drafted: torch.Tensor
    """The chain that was drafted last."""
    draft: bool
    """Whether it is the draft head's pass."""


class PassLauncher:
    """The metadata buffer of passes, and their CUDA graphs."""

    def __init__(
        self,
        device: torch.device,
        cache: DeviceKVCache,
        build_metadata: MetadataBuilder,
        *,
        graphs: bool,
    ) -> None:
        self.ring = MetadataRing(device, METADATA_SIZE)
        self.launching = False
        """Whether a whole pass is being launched, or captured, at this moment."""
        self.capturing: CudaGraph | None = None
        """The graph that is being captured, if it may be cut."""
        self._device, self._cache, self._build_metadata = device, cache, build_metadata
        self._use_graphs = graphs
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self._graphs: dict[Any, CudaGraph] = {}
        self._seen: set[Any] = set()

    def clear(self) -> None:
        """Drops all CUDA graphs: buffers or weights have changed."""
        self._drop()
        self._seen.clear()

    def _drop(self) -> None:
        for graph in self._graphs.values():
            graph.void = True
        self._graphs.clear()

    @property
    def words(self) -> torch.Tensor:
        """The metadata of the current pass, on the GPU."""
        return self.ring.words

    def metadata_of(self, batch: CudaBatch) -> BatchMetadata:
        """The metadata of a pass; makes the buffers large enough for it."""
        return self.fit(batch.metadata_from(self._build_metadata))

    def fit(self, metadata: BatchMetadata) -> BatchMetadata:
        """Makes the buffers large enough for the metadata of a pass."""
        if len(metadata.words) > len(self.ring):
            self.ring.synchronize()  # its memory is reused
            self.ring = MetadataRing(self._device, triton.next_power_of_2(len(metadata.words)))
            self._drop()
        return metadata

    def captured(
        self, metadata: BatchMetadata, layer_range: tuple[int, int], kernels: SamplingKernels
    ) -> CudaGraph | None:
        """The graph of a pass all of whose rows are scored, and that is launched after another."""
        if len(metadata.words) > len(self.ring):
            return None
        key = _key(metadata, layer_range, metadata.rows, kernels, False, False, None)
        return self._graphs.get(key)

    def start(
        self,
        metadata: BatchMetadata,
        deferred: DeferredPass,
        rows: int,
        kernels: SamplingKernels,
        head: DeviceLMHead,
        *,
        cut: bool = True,
        realignment: Realignment | None = None,
    ) -> CudaGraph | None:
        """Launches a whole pass and `rows` rows of the LM head: from a graph, once it is captured.

        Returns the graph, for `replay` of the same pass later.
        cut: the GPU has nothing else to do while the pass is handed to it.
        """
        moves = self._cache.write_moves(metadata.words)

        def work(graph: CudaGraph | None = None) -> None:
            self.ring.fetch()
            self.launching, self.capturing = True, graph if cut else None
            try:
                if moves:
                    self._cache.launch(self.words)
                if realignment is not None:
                    realign(
                        self.words, realignment.best, realignment.drafted, self._state, metadata,
                        self._build_metadata.geometry.page_size, draft=realignment.draft,
                    )  # fmt: skip
                deferred.batch.metadata = metadata
                left = deferred.layers()
            finally:
                self.launching, self.capturing = False, None
            if rows:
                head.launch(left.low, rows, kernels, self.words, metadata.head_at,
                            metadata.sampling_at)  # fmt: skip

        self.ring.post(metadata.words)
        try:
            if not self._use_graphs or metadata.rows > MAX_GRAPH_ROWS:
                work()
                return None
            key = _key(metadata, deferred.layer_range, rows, kernels, cut, moves, realignment)
            if key not in self._seen:  # compiles kernels
                self._seen.add(key)
                work()
                return None
            if key not in self._graphs:
                self._graphs[key] = CudaGraph(work)
            self._graphs[key].replay()
            return self._graphs[key]
        except BaseException:
            self.ring.realign()
            raise

    def replay(self, graph: CudaGraph | None, words: Int32Array) -> bool:
        """Replays a pass with other metadata; False if it cannot, and must be started.

        The graph was captured with copies of KV before the pass if there are some now.
        """
        if graph is None or graph.void or len(words) > len(self.ring):
            return False
        self._cache.write_moves(words)
        self.ring.post(words)
        graph.replay()
        return True


def _key(
    metadata: BatchMetadata,
    layer_range: tuple[int, int],
    head_rows: int,
    kernels: SamplingKernels,
    cut: bool,
    moves: bool,
    realignment: Realignment | None,
) -> Any:
    """What captured passes differ in; realigned ones also in the buffers that they read."""
    buffers = realignment and (
        realignment.draft,
        realignment.best.data_ptr(),
        realignment.drafted.data_ptr(),
    )
    return (
        layer_range,
        metadata.rows,
        metadata.tile,
        metadata.paged,
        metadata.splits,
        metadata.programs,
        metadata.load,
        metadata.windows,
        head_rows,
        kernels,
        cut,
        moves,
        buffers,
    )
