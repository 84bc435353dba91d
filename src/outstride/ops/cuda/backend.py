"""`Cuda`: the operations of a pass on one card.

Weights and cache are bf16 (fp16 on cards without it), sums are float32, and so is the residual
stream; a copy of it in the format of the weights is what products read. Rows are padded to a few
sizes; for each of them the layers are recorded once as a CUDA graph and replayed. What changes from
pass to pass is in one buffer of words that is copied before a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.select import select
from outstride.ops.contract import LayerWeights, Model, Ops, Span, Wanted
from outstride.ops.cuda.attention import PARTIAL, Partials, attend, embed_kernel, keep_kernel
from outstride.ops.cuda.choose import PLACES, Chooser, fill
from outstride.ops.cuda.layout import Layout, describe
from outstride.ops.cuda.linear import ADDED, FLOATS, GATED, HEADS, Matrix, Scratch, Turn, linear, up

SIZES = (16, 32, 64, 128)
"""Padded numbers of rows for which passes are recorded; larger ones are launched one by one."""
HEAD_ROWS = 128
"""So many rows of the vocabulary exist at once."""
RING = 4
"""Transfers that may be under way."""


@dataclass(frozen=True, slots=True)
class Rows:
    """States: some rows of a buffer, and the layer that they enter next."""

    x: torch.Tensor
    low: torch.Tensor
    start: int
    stop: int
    layer: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A described pass."""

    spans: Sequence[Span]
    layout: Layout
    places: dict[int | None, int]
    mixtures: bool


class _Ring:
    """Pinned memory from which words are copied to one place on the card."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        self._host = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(RING)
        ]
        self._views = [host.numpy() for host in self._host]
        self._events: list[Any] = [None] * RING
        self._next = 0

    def __len__(self) -> int:
        return len(self.words)

    def send(self, words: IntArray | Any) -> None:
        """Copies words; returns before they have arrived."""
        at, self._next = self._next, (self._next + 1) % RING
        if self._events[at] is not None:
            self._events[at].synchronize()
        count = len(words)
        self._views[at][:count] = words
        self.words[:count].copy_(self._host[at][:count], non_blocking=True)
        if self._pinned:
            self._events[at] = self._events[at] or torch.cuda.Event()
            self._events[at].record()


class Cuda(Ops):
    """Weights, cache and passes on a card."""

    remote = True

    def __init__(
        self, model: Model, *, device: str = "cuda", graphs: bool = True, pdl: bool | None = None
    ) -> None:
        self._shape = shape = model.shape
        self._device = torch.device(device)
        on_card = self._device.type == "cuda"
        lean = not on_card or not torch.cuda.is_bf16_supported()
        self._dtype = torch.float16 if lean else torch.bfloat16
        self._graphs_wanted = graphs and on_card
        if pdl is None:
            pdl = on_card and torch.cuda.get_device_capability(self._device)[0] >= 9
        self._pdl = pdl
        self._wide = max(16, triton.next_power_of_2(shape.head_dim))
        self._width = up(shape.hidden_size, 256)
        self._slots, self._page_size = model.slots, model.page_size
        self._programs = 264
        if on_card:
            count = torch.cuda.get_device_properties(self._device).multi_processor_count
            self._programs = 2 * count
        self._embedding = model.embedding.to(self._device, self._dtype).contiguous()
        vocabulary = model.embedding if model.head is None else model.head
        self._vocabulary = self._pack(vocabulary, None, model.norm)
        self._layers = [self._pack_layer(layer) for layer in model.layers]
        entries = (shape.layers, model.slots + model.page_size, shape.kv_heads, self._wide)
        self._keys = torch.zeros(entries, dtype=self._dtype, device=self._device)
        self._values = torch.zeros(entries, dtype=self._dtype, device=self._device)
        self._planes = model.features
        self._features = self._zeros(
            model.slots + model.page_size, len(model.features) * shape.hidden_size
        )
        self._extra = 0
        inverse = torch.tensor(shape.frequencies, dtype=torch.float64).to(torch.float32)
        places = torch.arange(min(shape.context, 1 << 20), dtype=torch.float32)
        angles = places[:, None] * inverse
        self._cosines = (angles.cos() * shape.rope_scale).to(self._device)
        self._sines = (angles.sin() * shape.rope_scale).to(self._device)
        self._partials = Partials(self._device)
        self._room = PARTIAL // (shape.kv_heads * self._wide)
        self._head_scratch = Scratch.make(self._device, HEAD_ROWS)
        self._logits = self._zeros(HEAD_ROWS, up(shape.vocab_size, 256))
        self._chooser = Chooser(self._device, HEAD_ROWS, shape.vocab_size)
        self._head_words = _Ring(self._device, HEAD_ROWS * (1 + PLACES))
        self._best = torch.zeros(HEAD_ROWS, dtype=torch.int32, pin_memory=on_card)
        self._scored = torch.cuda.Event() if on_card else None
        self._unfinished: Callable[[], list[Scores]] | None = None
        self._layer_graphs: dict[Any, Any] = {}
        self._head_graphs: dict[Any, Any] = {}
        self._seen: set[Any] = set()
        self._reserve(512, 1 << 16)
        kind = torch.cuda.get_device_name(self._device) if on_card else "interpreted"
        format_ = "fp16" if lean else "bf16"
        self.name = f"cuda {format_} triton {triton.__version__} {kind}"

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    # --- weights ----------------------------------------------------------------------------------

    def _pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> Matrix:
        return Matrix.pack(weight, bias, norm, self._device, self._dtype)

    def _pack_layer(self, layer: LayerWeights) -> _Layer:
        shape, wide, size = self._shape, self._wide, self._shape.head_dim
        turned = shape.heads + shape.kv_heads
        pairs = torch.stack([torch.arange(size // 2), torch.arange(size // 2) + size // 2], dim=1)

        def by_head(rows: torch.Tensor) -> torch.Tensor:
            """Each head padded, the halves that turn against each other made neighbours."""
            heads = rows.reshape(-1, size, *rows.shape[1:])
            order = pairs.reshape(-1).to(rows.device)
            padded = rows.new_zeros(len(heads), wide, *rows.shape[1:])
            padded[:turned, :size] = heads[:turned].index_select(1, order)
            padded[turned:, :size] = heads[turned:]
            return padded.flatten(0, 1)

        def paired(rows: torch.Tensor) -> torch.Tensor:
            """Gate and up made neighbours."""
            both: torch.Tensor = rows.unflatten(0, (2, -1))
            return both.transpose(0, 1).flatten(0, 1)

        def maybe(
            change: Callable[[torch.Tensor], torch.Tensor], bias: torch.Tensor | None
        ) -> torch.Tensor | None:
            return None if bias is None else change(bias)

        def norm(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else weight.to(self._device, torch.float32)

        mixed = layer.output.unflatten(1, (shape.heads, size))
        if wide != size:
            mixed = torch.nn.functional.pad(mixed, (0, wide - size))
        return _Layer(
            qkv=self._pack(
                by_head(layer.qkv), maybe(by_head, layer.qkv_bias), layer.attention_norm
            ),
            output=self._pack(mixed.flatten(1), layer.output_bias, None),
            gate_up=self._pack(
                paired(layer.gate_up), maybe(paired, layer.gate_up_bias), layer.mlp_norm
            ),
            down=self._pack(layer.down, layer.down_bias, None),
            query_norm=norm(layer.query_norm),
            key_norm=norm(layer.key_norm),
        )

    # --- room -------------------------------------------------------------------------------------

    def _reserve(self, rows: int, words: int) -> None:
        """Buffers for passes of this size; larger ones make recorded passes void."""
        shape = self._shape

        def room(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=self._device)

        inner = up(shape.intermediate_size, 256)
        self._x = room(self._width, torch.float32)
        self._low = room(self._width, self._dtype)
        self._queries = room(shape.heads * self._wide, self._dtype)
        self._mixed = room(up(shape.heads * self._wide, 128), self._dtype)
        self._inner = room(inner, self._dtype)
        self._scratch = Scratch.make(self._device, rows)
        self._words = _Ring(self._device, words)
        self._layer_graphs.clear()
        self._head_graphs.clear()
        self._seen.clear()

    def _padded(self, rows: int) -> int:
        return next((size for size in SIZES if rows <= size), up(rows, 128))

    # --- a pass -----------------------------------------------------------------------------------

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Batch:
        shape = self._shape
        rows = self._padded(spans[-1].rows.stop)
        kinds = list(dict.fromkeys(windows))
        layout = describe(
            spans,
            kinds,
            rows=rows,
            group=shape.heads // shape.kv_heads,
            kv_heads=shape.kv_heads,
            wide=self._wide,
            page_size=self._page_size,
            spare=self._slots,
            programs=self._programs,
            room=self._room,
        )
        if rows > len(self._x) or len(layout.words) > len(self._words):
            self._reserve(
                max(len(self._x), triton.next_power_of_2(rows)),
                max(len(self._words), triton.next_power_of_2(len(layout.words))),
            )
        mixtures = any(span.graph.mixtures for span in spans)
        return Batch(spans, layout, {w: i for i, w in enumerate(kinds)}, mixtures)

    def enter(
        self, batch: Batch, states: Sequence[Rows | torch.Tensor | FloatArray | None]
    ) -> Rows:
        rows, size = batch.layout.rows, self._shape.hidden_size
        held: list[torch.Tensor | None] = []
        for state in states:
            if isinstance(state, Rows):
                held.append(state.x[state.start : state.stop, :size].clone())
            elif state is None:
                held.append(None)
            else:
                array = np.ascontiguousarray(state, dtype=np.float32)
                held.append(torch.from_numpy(array).to(self._device))
        embed_kernel[(rows,)](
            self._row_words(rows, 0), self._embedding, self._x, self._low, self._width, size,
            WIDTH=triton.next_power_of_2(size), PDL=False, num_warps=4,
        )  # fmt: skip
        if batch.mixtures:
            for span, state in zip(batch.spans, held, strict=True):
                if state is None:
                    self._mix(span)
        for span, state in zip(batch.spans, held, strict=True):
            if state is not None:
                self._x[span.rows, :size] = state
                self._low[span.rows, :size] = state.to(self._dtype)
        return Rows(self._x, self._low, 0, rows, 0)

    def _mix(self, span: Span) -> None:
        """Inputs that are mixtures, summed in the order in which they are given."""
        size = self._shape.hidden_size
        for node, mixture in span.graph.mixtures.items():
            if node >= span.first:
                total = self._zeros(size)
                for token, weight in zip(mixture.tokens, mixture.weights, strict=True):
                    total += self._embedding[token].float() * weight
                row = span.row + node - span.first
                self._x[row, :size] = total
                self._low[row, :size] = total.to(self._dtype)

    def _row_words(self, rows: int, field: int) -> torch.Tensor:
        """Tokens, positions or slots of the pass that the words describe."""
        start = field * rows
        return self._words.words[start : start + rows]

    def project(self, layer: int, x: Rows, batch: Batch) -> torch.Tensor:
        shape, weights, rows = self._shape, self._layers[layer], batch.layout.rows
        turn = Turn(
            positions=self._row_words(rows, 1),
            slots=self._row_words(rows, 2),
            cosines=self._cosines,
            sines=self._sines,
            keys=self._keys[layer],
            values=self._values[layer],
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head=shape.head_dim,
            wide=self._wide,
            rope=shape.rope_layers[layer],
        )
        linear(
            weights.qkv,
            x.low,
            rows,
            HEADS,
            self._scratch,
            low=self._queries,
            norm=shape.norm_eps,
            turn=turn,
            pdl=self._pdl,
        )
        return self._queries

    def attend(self, layer: int, queries: torch.Tensor, batch: Batch) -> torch.Tensor:
        shape, layout = self._shape, batch.layout
        window = shape.windows[layer]
        attend(
            queries,
            self._keys[layer],
            self._values[layer],
            self._mixed,
            self._words.words[layout.windows[batch.places[window]] :],
            self._words.words,
            self._partials,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head=shape.head_dim,
            wide=self._wide,
            window=window,
            rows=layout.tile,
            programs=self._programs,
            shared=layout.shared,
            splits=layout.splits,
            page_size=self._page_size,
            pdl=self._pdl,
        )
        return self._mixed

    def output(self, layer: int, x: Rows, mixed: torch.Tensor, batch: Batch) -> Rows:
        rows, weights = batch.layout.rows, self._layers[layer]
        linear(
            weights.output,
            mixed,
            rows,
            ADDED,
            self._scratch,
            out=x.x,
            low=x.low,
            pdl=self._pdl,
            ahead=rows <= SIZES[-1],  # attention leaves the memory idle
        )
        return x

    def mlp(self, layer: int, x: Rows, batch: Batch) -> Rows:
        rows, weights, inner = batch.layout.rows, self._layers[layer], self._inner
        norm, pdl, scratch = self._shape.norm_eps, self._pdl, self._scratch
        linear(weights.gate_up, x.low, rows, GATED, scratch, low=inner, norm=norm, pdl=pdl)
        linear(weights.down, inner, rows, ADDED, scratch, out=x.x, low=x.low, pdl=pdl)
        return replace(x, layer=layer + 1)

    def keep_features(self, layer: int, x: Rows, batch: Batch) -> None:
        if layer in self._planes:
            size, at = self._shape.hidden_size, self._planes.index(layer)
            rows = batch.layout.rows
            keep_kernel[(rows,)](
                x.x, self._row_words(rows, 2), self._features[:, at * size :],
                self._width, self._features.stride(0), size,
                WIDTH=triton.next_power_of_2(size), num_warps=4,
            )  # fmt: skip

    def run(self, layers: Callable[[], Rows], batch: Batch, whole: bool) -> Rows:
        """Runs the layers. A whole pass of a common size is recorded, then replayed."""
        self._words.send(batch.layout.words)
        layout = batch.layout
        if not (self._graphs_wanted and whole and not batch.mixtures and layout.rows <= SIZES[-1]):
            return layers()
        key = (layout.rows, layout.tile, layout.shared, layout.splits, layout.windows)
        if key not in self._seen:  # compiles what is missing
            self._seen.add(key)
            return layers()
        if key not in self._layer_graphs:
            self._layer_graphs[key] = _record(layers)
        self._layer_graphs[key].replay()
        return Rows(self._x, self._low, 0, layout.rows, self._shape.layers)

    def leave(self, x: Rows, rows: slice) -> Rows:
        if x.layer == self._shape.layers:
            return Rows(x.x, x.low, rows.start, rows.stop, x.layer)
        part = slice(rows.start, rows.stop)
        return Rows(x.x[part].clone(), x.low[part].clone(), 0, rows.stop - rows.start, x.layer)

    def read(self, state: Rows) -> FloatArray:
        found = state.x[state.start : state.stop, : self._shape.hidden_size]
        return np.array(found.cpu().numpy(), dtype=np.float32)

    # --- the head ---------------------------------------------------------------------------------

    def head(self, wanted: Sequence[Wanted]) -> list[Scores]:
        return self.score(wanted)()

    def score(self, wanted: Sequence[Wanted]) -> Callable[[], list[Scores]]:
        low, places = self._collected(wanted)
        if len(places) <= HEAD_ROWS:
            return self._head(wanted, low, places)
        scores: list[list[Scores]] = [[] for _ in wanted]
        start = 0
        for i, item in enumerate(wanted):  # many rows: one proposal at a time, in pieces
            for at in range(0, len(item.nodes), HEAD_ROWS):
                nodes = item.nodes[at : at + HEAD_ROWS]
                some = replace(item, nodes=nodes)
                scores[i] += self._head([some], low, places[start : start + len(nodes)])()
                start += len(nodes)
        joined = [
            Scores.joined(found) if found else self._nothing(item)
            for item, found in zip(wanted, scores, strict=True)
        ]
        return lambda: joined

    def _nothing(self, item: Wanted) -> Scores:
        nothing = np.zeros((0, self._shape.vocab_size), dtype=np.float32)
        return select(item.proposal, item.nodes, nothing)

    def _collected(self, wanted: Sequence[Wanted]) -> tuple[torch.Tensor, list[int]]:
        """One buffer that holds everybody's states, and the row of each wanted node in it."""
        low: torch.Tensor | None = None
        places: list[int] = []
        for item in wanted:
            state = item.state
            if not len(item.nodes):
                continue
            if not isinstance(state, Rows) or (low is not None and state.low is not low):
                return self._gathered(wanted)
            low = state.low
            shift = state.start - item.first
            places += [node + shift for node in item.nodes.tolist()]
        return self._low if low is None else low, places

    def _gathered(self, wanted: Sequence[Wanted]) -> tuple[torch.Tensor, list[int]]:
        """States from several buffers, copied into one."""
        rows: list[torch.Tensor] = []
        places: list[int] = []
        at = 0
        for item in wanted:
            state = item.state
            if not len(item.nodes):
                continue
            if isinstance(state, Rows):
                rows.append(state.low[state.start : state.stop])
            else:
                array = np.ascontiguousarray(state, dtype=np.float32)
                part = torch.from_numpy(array).to(self._device, self._dtype)
                rows.append(torch.nn.functional.pad(part, (0, self._width - part.shape[1])))
            places += [node - item.first + at for node in item.nodes.tolist()]
            at += len(rows[-1])
        return torch.cat(rows), places

    def _head(
        self, wanted: Sequence[Wanted], low: torch.Tensor, places: list[int]
    ) -> Callable[[], list[Scores]]:
        """Starts the scores of at most HEAD_ROWS nodes."""
        count = len(places)
        if count == 0:
            empty = [self._nothing(item) for item in wanted]
            return lambda: empty
        if self._unfinished is not None:  # its results lie where these will
            self._unfinished()
        rows = self._padded(count)
        words = np.zeros(rows * (1 + PLACES), dtype=np.int32)
        words[:count] = places
        draws = words[rows:].reshape(rows, PLACES)
        filtered, line, simple = False, 0, True
        for item in wanted:
            proposal = item.proposal
            simple = simple and _simple(proposal)
            if proposal.draw.temperature != 0.0:
                for i, node in enumerate(item.nodes.tolist()):
                    position = int(proposal.graph.positions[node]) + proposal.offset
                    filtered |= fill(draws[line + i], proposal.draw, position)
            line += len(item.nodes)
        self._head_words.send(words)
        self._score(low, rows, filtered)
        if self._scored is not None:
            self._scored.record()
        found: list[Scores] = []

        def finish() -> list[Scores]:
            if not found:
                self._unfinished = None
                if self._scored is not None:
                    self._scored.synchronize()
                found.extend(self._found(wanted, count))
            return found

        self._unfinished = finish
        if not simple:  # rows of logits must be read before anything else is launched
            finish()
        return finish

    def _found(self, wanted: Sequence[Wanted], count: int) -> list[Scores]:
        """What the last start of the head yielded."""
        best = self._best[:count].numpy().astype(np.int64)[:, None]
        scores, start = [], 0
        for item in wanted:
            stop = start + len(item.nodes)
            if _simple(item.proposal):
                scores.append(Scores(nodes=item.nodes, best=best[start:stop]))
            else:
                raw = self._logits[start:stop, : self._shape.vocab_size].cpu().numpy()
                scores.append(select(item.proposal, item.nodes, raw.copy()))
            start = stop
        return scores

    def _score(self, low: torch.Tensor, rows: int, filtered: bool) -> None:
        """Starts the logits of the chosen rows, and the choice."""

        def work() -> Any:
            self._head_kernels(low, rows, filtered)
            self._best[:rows].copy_(self._chooser.best[:rows], non_blocking=True)
            return None

        key = (rows, filtered)
        if not self._graphs_wanted or low is not self._low:
            work()
        elif (key, "head") not in self._seen:
            self._seen.add((key, "head"))
            work()
        else:
            if key not in self._head_graphs:
                self._head_graphs[key] = _record(work)
            self._head_graphs[key].replay()

    def _head_kernels(self, low: torch.Tensor, rows: int, filtered: bool) -> None:
        words = self._head_words.words
        linear(
            self._vocabulary,
            low,
            rows,
            FLOATS,
            self._head_scratch,
            out=self._logits,
            norm=self._shape.norm_eps,
            gather=words[:rows],
        )
        draws = words[rows : rows * (1 + PLACES)]
        self._chooser.choose(self._logits, draws, rows, filtered)

    # --- what lasts longer than a pass ------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        both = np.stack([np.asarray(sources), np.asarray(targets)])
        read, write = torch.from_numpy(np.ascontiguousarray(both, dtype=np.int64)).to(self._device)
        for pool in (self._keys, self._values):
            pool.index_copy_(1, write, pool.index_select(1, read))
        if self._planes:
            self._features.index_copy_(0, write, self._features.index_select(0, read))

    def feature(self, slot: int) -> FloatArray:
        return np.array(self._features[slot].cpu().numpy(), dtype=np.float32)

    def add_rows(self, rows: torch.Tensor) -> int:
        before = self._extra
        added = rows.to(self._device, self._dtype)
        self._embedding = torch.cat([self._embedding, added]).contiguous()
        self._extra += len(rows)
        self._layer_graphs.clear()
        return before


def _simple(proposal: Proposal) -> bool:
    """Whether a proposal wants its tokens and nothing else."""
    wants = proposal.wants
    return (
        wants.best <= 1
        and wants.logprobs is None
        and not wants.rows
        and not wants.logits
        and not proposal.rules
    )


def _record(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `work` launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph
