"""`Cuda`: the operations of a pass on one card.

Weights and cache are bf16 (fp16 on cards without it), sums are float32, and so is the residual
stream; a copy of it in the format of the weights is what products read. Rows are padded to a few
sizes; for each of them the layers are recorded once as a CUDA graph and replayed. What changes from
pass to pass is in one buffer of words, which a replay begins by fetching from the host's memory.

A whole pass is launched when its head is asked for: layers, head and choice are one graph, and what
comes back is one token a row. Where sequences go on step by step, the pass behind it is launched with
it (see `steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]

from outstride.core.contracts import Work
from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.ops.contract import GraftWeights, Model, Ops, Span, Wanted
from outstride.ops.cuda import chain
from outstride.ops.cuda.attention import PARTIAL, Partials, attend, embed_kernel, keep_kernel
from outstride.ops.cuda.foresight import Foresight, Started
from outstride.ops.cuda.grafts import Grafted
from outstride.ops.cuda.head import Head, Kind, Rows, padded
from outstride.ops.cuda.launch import Batch, Deferred, Launcher
from outstride.ops.cuda.layout import (
    BEST,
    HEAD_ROWS,
    HEADER,
    PLACES,
    SIZES,
    Card,
    Layout,
)
from outstride.ops.cuda.linear import ADDED, GATED, HEADS, linear
from outstride.ops.cuda.matrices import Matrix, Scratch, Turn, up
from outstride.ops.cuda.moves import Entries
from outstride.ops.cuda.steps import STAGED
from outstride.ops.cuda.tiles import Describer
from outstride.ops.cuda.weights import Layer

CUTS = (1, 9)
"""Behind which layers a recorded pass is cut, if the card waits for it."""


class Cuda(Ops):
    """Weights, cache and passes on a card."""

    remote = True
    chains = True

    def __init__(
        self, model: Model, *, device: str = "cuda", graphs: bool = True, pdl: bool | None = None
    ) -> None:
        self._shape = shape = model.shape
        self._device = torch.device(device)
        on_card = self._device.type == "cuda"
        lean = not on_card or not torch.cuda.is_bf16_supported()
        self._dtype = torch.float16 if lean else torch.bfloat16
        if pdl is None:
            pdl = on_card and torch.cuda.get_device_capability(self._device)[0] >= 9
        self._pdl = pdl
        self._wide = max(16, triton.next_power_of_2(shape.head_dim))
        self._width = up(shape.hidden_size, 256)
        programs = 264
        if on_card:
            count = torch.cuda.get_device_properties(self._device).multi_processor_count
            programs = 2 * count
        self._card = Card(
            group=shape.heads // shape.kv_heads,
            kv_heads=shape.kv_heads,
            wide=self._wide,
            page_size=model.page_size,
            spare=model.slots,
            programs=programs,
            room=PARTIAL // (shape.kv_heads * self._wide),
        )
        self._describe = Describer(self._card)
        self.windows = tuple(shape.windows)
        self._embedding = model.embedding.to(self._device, self._dtype).contiguous()
        vocabulary = model.embedding if model.head is None else model.head
        tied = model.head is None
        self._vocabulary = self._embedding if tied else vocabulary.to(self._dtype)
        self._grafts: dict[str, Grafted] = {}
        self._layers = [
            Layer.pack(layer, shape, self._wide, self._device, self._dtype)
            for layer in model.layers
        ]
        slots = model.slots + (1 + STAGED) * model.page_size
        self._planes = model.features
        self._entries = Entries(
            shape.layers,
            slots,
            shape.kv_heads,
            self._wide,
            len(model.features) * shape.hidden_size,
            self._device,
            self._dtype,
        )
        self._extra = 0
        inverse = torch.tensor(shape.frequencies, dtype=torch.float64).to(torch.float32)
        places = torch.arange(min(shape.context, 1 << 20), dtype=torch.float32)
        angles = places[:, None] * inverse
        self._cosines = (angles.cos() * shape.rope_scale).to(self._device)
        self._sines = (angles.sin() * shape.rope_scale).to(self._device)
        self._partials = Partials(self._device)
        matrix = Matrix.pack(vocabulary, None, model.norm, self._device, self._dtype)
        self._head = Head(
            matrix,
            shape.norm_eps,
            shape.vocab_size,
            self._width,
            self._device,
            self._dtype,
            self._pdl,
        )
        self._deferred: Deferred | None = None
        wanted = graphs and on_card
        self._launcher = Launcher(self._device, self._entries, model.page_size, graphs=wanted)
        self._foresight = Foresight(
            self._launcher,
            self._entries,
            self._card,
            self._head,
            shape.windows,
            len(self._cosines),
        )
        self._reserve(512)
        kind = torch.cuda.get_device_name(self._device) if on_card else "interpreted"
        format_ = "fp16" if lean else "bf16"
        self.name = f"cuda {format_} triton {triton.__version__} {kind}"

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    # --- room -------------------------------------------------------------------------------------

    def _reserve(self, rows: int) -> None:
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
        for graft in self._grafts.values():
            graft.reserve(rows)
        self._forget()

    def _forget(self) -> None:
        """What was recorded holds no longer: buffers or weights are others now."""
        self._launcher.clear()
        self._foresight.forget()

    # --- a pass -----------------------------------------------------------------------------------

    def whole(self, work: Sequence[Work]) -> Callable[[], list[Scores]] | None:
        """The scores of a pass that is under way already; and what comes behind it is launched."""
        return self._foresight.match(work)

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Batch:
        self._deferred = None
        self._foresight.clear()
        rows = padded(spans[-1].rows.stop)
        if rows > len(self._x):
            self._reserve(triton.next_power_of_2(rows))
        mixtures = any(span.graph.mixtures for span in spans)
        return Batch(spans, tuple(dict.fromkeys(windows)), rows, mixtures)

    def _layout(self, batch: Batch) -> Layout:
        """The description of a pass; makes room for its words."""
        return self._launcher.fit(batch.layout_for(self._describe))

    def enter(
        self, batch: Batch, states: Sequence[Rows | torch.Tensor | FloatArray | None]
    ) -> Rows:
        rows, size = batch.rows, self._shape.hidden_size
        held: list[torch.Tensor | None] = []
        if (
            self._launcher.under_way
        ):  # launched late: by now the states are those that it will leave
            states = [None] * len(states)
        for state in states:
            if isinstance(state, Rows):
                held.append(state.x[state.start : state.stop, :size].clone())
            elif state is None:
                held.append(None)
            else:
                array = np.ascontiguousarray(state, dtype=np.float32)
                held.append(torch.from_numpy(array).to(self._device))
        embed_kernel[(rows,)](
            self._row_words(rows, 0), self._head.chosen, self._embedding, self._x, self._low,
            self._width, size, WIDTH=triton.next_power_of_2(size), num_warps=4,
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
        start = HEADER + field * rows
        return self._launcher.words.words[start : start + rows]

    def project(self, layer: int, x: Rows, batch: Batch) -> torch.Tensor:
        weights, rows = self._layers[layer], batch.rows
        linear(
            weights.qkv,
            x.low,
            rows,
            HEADS,
            self._scratch,
            low=self._queries,
            norm=self._shape.norm_eps,
            turn=self._turn(layer, batch),
            pdl=self._pdl,
            summed=x.layer == layer > 0,  # else these states were not left by a product
        )
        return self._queries

    def _turn(self, layer: int, batch: Batch) -> Turn:
        """Where a layer's keys and values go, and how they are turned."""
        shape, weights, rows = self._shape, self._layers[layer], batch.rows
        return Turn(
            positions=self._row_words(rows, 1),
            slots=self._row_words(rows, 2),
            cosines=self._cosines,
            sines=self._sines,
            keys=self._entries.keys[layer],
            values=self._entries.values[layer],
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head=shape.head_dim,
            wide=self._wide,
            rope=layer >= shape.layers or shape.rope_layers[layer],
        )

    def attend(self, layer: int, queries: torch.Tensor, batch: Batch) -> torch.Tensor:
        shape, layout, card = self._shape, self._layout(batch), self._card
        window, words = self.windows[layer], self._launcher.words.words
        attend(
            queries,
            self._entries.keys[layer],
            self._entries.values[layer],
            self._mixed,
            words[layout.windows[batch.windows.index(window)] :],
            words,
            self._partials,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head=shape.head_dim,
            wide=self._wide,
            window=window,
            rows=layout.tile,
            programs=layout.programs,
            shared=layout.shared,
            splits=layout.splits,
            deep=layout.deep,
            page_size=card.page_size,
            pdl=self._pdl,
        )
        return self._mixed

    def output(self, layer: int, x: Rows, mixed: torch.Tensor, batch: Batch) -> Rows:
        rows, weights = batch.rows, self._layers[layer]
        linear(
            weights.output,
            mixed,
            rows,
            ADDED,
            self._scratch,
            out=x.x,
            low=x.low,
            pdl=self._pdl,
            ahead=SIZES[0] < rows <= SIZES[-1],  # long attention leaves the memory idle
        )
        return x

    def mlp(self, layer: int, x: Rows, batch: Batch) -> Rows:
        rows, weights, inner = batch.rows, self._layers[layer], self._inner
        norm, pdl, scratch = self._shape.norm_eps, self._pdl, self._scratch
        linear(
            weights.gate_up, x.low, rows, GATED, scratch, low=inner, norm=norm, pdl=pdl, summed=True
        )
        linear(weights.down, inner, rows, ADDED, scratch, out=x.x, low=x.low, pdl=pdl)
        recording = self._launcher.recording
        if recording is not None and layer in CUTS and layer + 1 < len(self._layers):
            recording.cut()
        return replace(x, layer=layer + 1)

    def keep_features(self, layer: int, x: Rows, batch: Batch) -> None:
        for graft in self._grafts.values():
            graft.tap(layer, x.x, batch.rows, self._shape.hidden_size)
        if layer in self._planes:
            size, at = self._shape.hidden_size, self._planes.index(layer)
            rows, features = batch.rows, self._entries.features
            keep_kernel[(rows,)](
                x.x, self._row_words(rows, 2), features[:, at * size :],
                self._width, features.stride(0), size,
                WIDTH=triton.next_power_of_2(size), num_warps=4,
            )  # fmt: skip

    def run(self, layers: Callable[[], Rows], batch: Batch, whole: tuple[int, int] | None) -> Rows:
        """Runs the layers. A whole pass is launched together with its head."""
        if whole is not None and not batch.mixtures:
            self._deferred = Deferred(layers, batch, whole)
            return Rows(self._x, self._low, 0, batch.rows, whole[1])
        self._entries.settle()
        layout = self._layout(batch)  # may make new room for words
        self._launcher.words.send(layout.words)
        return layers()

    def digest(self, batch: Batch) -> None:
        for graft in self._grafts.values():
            turns = [self._turn(graft.first + i, batch) for i in range(len(graft.layers))]
            graft.digest(batch.rows, self._shape.norm_eps, turns, self._queries)

    def attach(self, name: str, weights: GraftWeights) -> int:
        first = len(self._layers)
        graft = Grafted.pack(
            weights,
            self._shape,
            self._vocabulary,
            first=first,
            wide=self._wide,
            rows=len(self._x),
            device=self._device,
            dtype=self._dtype,
            pdl=self._pdl,
        )
        self._layers += graft.layers
        self.windows += (weights.window,) * len(graft.layers)
        self._entries.grow(len(graft.layers))
        self._grafts[name] = graft
        self._forget()
        return first

    def leave(self, x: Rows, rows: slice) -> Rows:
        if self._deferred is not None:  # its head will find them there
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
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return self._apart(wanted)
        some = next((item for item in wanted if len(item.nodes)), wanted[0])
        head = self._head_of(some.proposal.graft)
        layout = self._layout(deferred.batch)
        count = sum(len(item.nodes) for item in wanted)
        if not 0 < count <= HEAD_ROWS:
            self._launcher.start(layout, deferred, 0, Kind(), head)
            return head.alone(wanted, self._low)
        return self._start(deferred, layout, wanted, count, head)

    def _head_of(self, part: str) -> Head:
        """The model's own, or that of a trained part."""
        return self._grafts[part].head if part else self._head

    def _apart(self, wanted: Sequence[Wanted]) -> Callable[[], list[Scores]]:
        """Scores of states that are there, some of them perhaps guesses of trained parts."""
        groups: dict[str, list[int]] = {}
        for i, item in enumerate(wanted):
            groups.setdefault(item.proposal.graft, []).append(i)
        pending = [
            (members, self._head_of(name).alone([wanted[i] for i in members], self._low))
            for name, members in groups.items()
        ]

        def scores() -> list[Scores]:
            found = {
                i: one for members, wait in pending for i, one in zip(members, wait(), strict=True)
            }
            return [found[i] for i in range(len(wanted))]

        return scores

    def _start(
        self,
        deferred: Deferred,
        layout: Layout,
        wanted: Sequence[Wanted],
        count: int,
        head: Head,
    ) -> Callable[[], list[Scores]]:
        """Starts a pass and its head; where it makes sense, the pass behind it."""
        at, room = layout.head_at, layout.head_rows
        _, places = head.collected(wanted, self._low)
        layout.words[at : at + count] = places
        draws = layout.words[at + room : at + room * (1 + PLACES)].reshape(room, PLACES)
        kind, plain = head.describe(draws, wanted)
        reply = head.replies.take(count)
        layout.words[0] = reply.place
        own = head is self._head
        if not own and len(wanted) == 1 and count <= BEST:  # the chain of guesses, too
            (item,) = wanted
            reply.length = count
            first = item.proposal.graph.positions.item(int(item.nodes[0]))
            chain.describe(layout.words, count, item.proposal.draw, first)
        # The layers of a part are few, and behind a step comes the next one.
        cut = own and deferred.batch.steps is None
        self._launcher.start(layout, deferred, padded(count), kind, head, cut=cut)
        reply.launched()
        if plain:
            self._foresight.behind(
                Started(deferred, layout, wanted, head, kind, draws[:count], reply)
            )
        return head.collect(wanted, reply, plain)

    # --- what lasts longer than a pass ------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        self._foresight.clear()
        self._entries.move(sources, targets)

    def feature(self, slot: int) -> FloatArray:
        self._entries.settle()
        return np.array(self._entries.features[slot].cpu().numpy(), dtype=np.float32)

    def add_rows(self, rows: torch.Tensor) -> int:
        before = self._extra
        added = rows.to(self._device, self._dtype)
        self._embedding = torch.cat([self._embedding, added]).contiguous()
        self._extra += len(rows)
        self._forget()
        return before
