"""`CudaGraph`: the kernels of a pass, captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraph:
    """The kernels that a pass launches, as CUDA graphs that are replayed one after the other.

    All kernels must have been launched before, so that nothing is compiled during capture. A graph is
    handed to the GPU as a whole, which takes the host as long as it is large. Where the GPU waits for
    it, the pass is cut in several graphs, and small ones come first.
    """

    def __init__(self, work: Callable[[CudaGraph], object]) -> None:
        """Captures what `work` launches; it may `cut` the graph."""
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.void = False
        """Whether the buffers that it works on are gone."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._begin()
            try:
                work(self)
            finally:
                self._graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        self._graphs.append(graph)

    def cut(self) -> None:
        """What is launched from here on is a graph of its own."""
        self._graphs[-1].capture_end()
        self._begin()

    def replay(self) -> None:
        """Launches the pass."""
        for graph in self._graphs:
            graph.replay()
