"""`RecurrentStates`: the states of recurrent layers by slot, and their arithmetic in plain torch.

Every operation is elementwise, and sums are fixed trees of additions: a node's bits depend on its own
path, not on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outstride.core.recurrent import StateAdvance, StateCopy, StateUpdate
from outstride.ops.arithmetic import rms_norm, row_sum, silu_mul
from outstride.ops.recurrent import RecurrentKind, RecurrentShape, RecurrentWeights
from outstride.ops.recurrent_plan import NodeLevel, RecurrentPlan, path_levels
from outstride.ops.reference_memory import zeros
from outstride.ops.weights import ModelShape


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the second last dimension of [.., n, width], halves added to each other."""
    while (size := x.shape[-2]) > 1:
        half = size // 2
        sums = x[..., :half, :] + x[..., half : 2 * half, :]
        x = sums if size % 2 == 0 else torch.cat([sums, x[..., -1:, :]], dim=-2)
    return x[..., 0, :]


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), written so that it overflows nowhere."""
    return x.clamp(min=0.0) + x.abs().neg_().exp_().log1p_()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), written out: the library's depends on the buffer's tail."""
    return x.neg().exp_().add_(1.0).reciprocal_()


@dataclass(slots=True)
class NodeInputs:
    """The inputs of nodes in one layer: all that a replay needs."""

    conv: torch.Tensor
    """[nodes, channels]: inputs of the convolution"""
    keys: torch.Tensor
    """[nodes, key_heads, key_dim]"""
    values: torch.Tensor
    """[nodes, heads, value_dim]"""
    decay: torch.Tensor
    """[nodes, heads]"""
    beta: torch.Tensor
    """[nodes, heads]; without columns where values are added as they are"""

    def rows(self, chosen: slice | torch.Tensor) -> NodeInputs:
        """Some of the nodes."""
        return NodeInputs(
            self.conv[chosen],
            self.keys[chosen],
            self.values[chosen],
            self.decay[chosen],
            self.beta[chosen],
        )

    def clone(self) -> NodeInputs:
        return NodeInputs(
            self.conv.clone(),
            self.keys.clone(),
            self.values.clone(),
            self.decay.clone(),
            self.beta.clone(),
        )

    @staticmethod
    def joined(parts: Sequence[NodeInputs]) -> NodeInputs:
        """Nodes one after the other."""
        if len(parts) == 1:
            return parts[0]
        return NodeInputs(
            torch.cat([part.conv for part in parts]),
            torch.cat([part.keys for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat([part.decay for part in parts]),
            torch.cat([part.beta for part in parts]),
        )


class Recurrence(Protocol):
    """Takes the nodes of levels into states, one after the other."""

    def __call__(
        self,
        states: torch.Tensor,
        before: Sequence[int | None],
        levels: Sequence[NodeLevel],
        nodes: NodeInputs,
        queries: torch.Tensor | None,
        rows: int,
    ) -> torch.Tensor:
        """Runs the nodes and copies states to slots as the levels say; [rows, heads, value_dim].

        states: [slots, heads, key_dim, value_dim]; before: the slot of each span, None for zeros.
        queries: [nodes, key_heads, key_dim] of the first `rows` nodes, the only ones with an output;
        None: no node has one.
        """
        ...


class TorchRecurrence:
    """The recurrence in plain torch. Implements `Recurrence`."""

    def __init__(self, shape: RecurrentShape) -> None:
        self._shape = shape

    def __call__(
        self,
        states: torch.Tensor,
        before: Sequence[int | None],
        levels: Sequence[NodeLevel],
        nodes: NodeInputs,
        queries: torch.Tensor | None,
        rows: int,
    ) -> torch.Tensor:
        shape = self._shape
        current = torch.zeros(len(before), shape.heads, shape.key_dim, shape.value_dim)
        for i, slot in enumerate(before):
            if slot is not None:
                current[i] = states[slot]
        if queries is not None:
            queries = queries.repeat_interleave(shape.heads // shape.key_heads, dim=1)
        found = torch.zeros(rows, shape.heads, shape.value_dim)
        for level in levels:
            current = self._step(current, nodes, level)
            for place, slot in level.kept:
                states[slot] = current[place]
            if queries is not None:
                own = level.nodes < rows  # nodes of earlier rounds have their output
                chosen = level.nodes[own]
                found[chosen] = tree_sum(current[own] * queries[chosen].unsqueeze(-1))
        return found

    def _step(self, current: torch.Tensor, nodes: NodeInputs, level: NodeLevel) -> torch.Tensor:
        """The states after the nodes of a level; [nodes, heads, key_dim, value_dim]."""
        shape, chosen = self._shape, level.nodes
        if level.parents is not None or len(current) != len(chosen):
            places = torch.arange(len(chosen)) if level.parents is None else level.parents
            current = current[places]
        keys = nodes.keys[chosen].repeat_interleave(shape.heads // shape.key_heads, dim=1)
        keys, values = keys.unsqueeze(-1), nodes.values[chosen]
        current = current * nodes.decay[chosen][..., None, None]
        if nodes.beta.shape[1]:
            values = (values - tree_sum(current * keys)) * nodes.beta[chosen].unsqueeze(-1)
        return current + keys * values.unsqueeze(-2)


@dataclass(slots=True)
class _LayerStates:
    """What one layer keeps."""

    windows: torch.Tensor
    """[slots, kernel - 1, channels]: the last inputs of the convolution, the oldest first"""
    states: torch.Tensor
    """[slots, heads, key_dim, value_dim]"""
    drafted: dict[int, NodeInputs] = field(default_factory=dict)
    """By slot: the inputs of the drafted nodes of the step under way."""


class RecurrentStates:
    """The state slots of all recurrent layers of a model."""

    def __init__(self, shape: RecurrentShape, slots: int) -> None:
        self.shape = shape
        self.recurrence: Recurrence = TorchRecurrence(shape)
        back, heads = shape.kernel - 1, shape.heads
        self._layers = {
            layer: _LayerStates(
                zeros(slots, back, shape.channels),
                zeros(slots, heads, shape.key_dim, shape.value_dim),
            )
            for layer, recurrent in enumerate(shape.layers)
            if recurrent
        }
        self._given: dict[int, int] = {}
        """By slot: how many nodes of the step under way were given."""

    @classmethod
    def of(cls, shape: ModelShape, slots: int) -> RecurrentStates | None:
        """The states of a model; None if it has no recurrent layers."""
        recurrent = shape.switches.recurrent
        return None if recurrent is None else cls(recurrent, slots)

    # --- the pass -----------------------------------------------------------------------------------

    def run(
        self, layer: int, weights: RecurrentWeights, projected: torch.Tensor, plan: RecurrentPlan
    ) -> torch.Tensor:
        """Rows for the output projection, [rows, inner]; keeps states and inputs as planned.

        projected: [rows, shape.projected], padded to whole tiles of rows.
        """
        shape, own, count = self.shape, self._layers[layer], plan.rows
        if shape.kind is RecurrentKind.CONV:
            low, gate, high = projected.chunk(3, dim=-1)
            entering = (low * high)[:count]
        else:
            entering = projected[:count, : shape.channels]
        stored = [own.drafted[slot] for slot, n in zip(plan.slots, plan.earlier, strict=True) if n]
        inputs = self._entering(own, plan, entering, stored)
        mixed = _convolve(inputs, plan.taps, weights)
        if shape.kind is RecurrentKind.CONV:
            result = torch.zeros_like(gate)
            result[:count] = gate[:count] * mixed
            none = entering[:, :0]
            fresh = NodeInputs(entering, none, none, none, none)
        else:
            result, fresh = self._recur(own, weights, projected, mixed, plan, stored)
        for taken, slot in plan.windows:
            own.windows[slot] = inputs[list(taken)]
        self._keep_drafted(own, plan, fresh)
        return result

    def _entering(
        self,
        own: _LayerStates,
        plan: RecurrentPlan,
        entering: torch.Tensor,
        stored: Sequence[NodeInputs],
    ) -> torch.Tensor:
        """All inputs that convolutions read: of rows, of earlier rounds, and before each span."""
        back, channels = self.shape.kernel - 1, self.shape.channels
        before = torch.zeros(len(plan.slots), back, channels)
        for i, (slot, fresh) in enumerate(zip(plan.slots, plan.fresh, strict=True)):
            if not fresh:
                before[i] = own.windows[slot]
        return torch.cat([entering, *(part.conv for part in stored), before.view(-1, channels)])

    def _recur(
        self,
        own: _LayerStates,
        weights: RecurrentWeights,
        projected: torch.Tensor,
        mixed: torch.Tensor,
        plan: RecurrentPlan,
        stored: Sequence[NodeInputs],
    ) -> tuple[torch.Tensor, NodeInputs]:
        """The rows after the recurrence, its norm and its gate; and the inputs of the rows."""
        shape, rows, count = self.shape, len(projected), plan.rows
        wide = shape.key_heads * shape.key_dim
        mixed = torch.cat([mixed, mixed.new_zeros(rows - count, shape.channels)])
        mixed = mixed / (mixed.neg().exp_().add_(1.0))  # SiLU
        queries, keys, values = mixed.split_with_sizes([wide, wide, shape.inner], dim=-1)
        gates, numbers = projected[:, shape.channels :].split_with_sizes(
            [shape.inner, shape.projected - shape.channels - shape.inner], dim=-1
        )
        heads = (rows, shape.key_heads, shape.key_dim)
        queries, keys = queries.reshape(heads), keys.reshape(heads)
        values = values.reshape(rows, shape.heads, shape.value_dim)
        fresh, queries = self._node_inputs(weights, queries, keys, values, numbers)
        fresh.conv = projected[:, : shape.channels]
        nodes = NodeInputs.joined([fresh.rows(slice(count)), *stored])
        before = [None if new else slot for slot, new in zip(plan.slots, plan.fresh, strict=True)]
        found = torch.zeros(rows, shape.heads, shape.value_dim)
        found[:count] = self.recurrence(
            own.states, before, plan.levels, nodes, queries[:count], count
        )
        return self._gated(weights, found, values, gates), fresh

    def _node_inputs(
        self,
        weights: RecurrentWeights,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        numbers: torch.Tensor,
    ) -> tuple[NodeInputs, torch.Tensor]:
        """Inputs of rows, those of the convolution aside; and their queries."""
        shape = self.shape
        assert weights.decay is not None
        assert weights.step_bias is not None
        if shape.kind is RecurrentKind.DELTA:
            queries, keys = _unit(queries) * shape.key_dim**-0.5, _unit(keys)
            beta, steps = numbers.chunk(2, dim=-1)
            decay = (weights.decay * softplus(steps + weights.step_bias)).exp_()
            return NodeInputs(numbers[:, :0], keys, values, decay, sigmoid(beta)), queries
        low, high = shape.step_limits
        steps = softplus(numbers + weights.step_bias)
        if low > 0 or high < math.inf:
            steps = steps.clamp(low, high)
        decay, added = (steps * weights.decay).exp_(), values * steps.unsqueeze(-1)
        return NodeInputs(numbers[:, :0], keys, added, decay, numbers[:, :0]), queries

    def _gated(
        self,
        weights: RecurrentWeights,
        found: torch.Tensor,
        values: torch.Tensor,
        gates: torch.Tensor,
    ) -> torch.Tensor:
        """Norm and output gate of rows [rows, heads, value_dim]; [rows, inner]."""
        shape, rows = self.shape, len(found)
        assert weights.norm is not None
        if shape.kind is RecurrentKind.DELTA:
            normed = rms_norm(found, weights.norm, shape.eps)
            return silu_mul(gates, normed.view(rows, -1))
        assert weights.skip is not None
        found = found + values * weights.skip[:, None]
        gated = silu_mul(gates, found.view(rows, -1))
        groups = (rows, shape.key_heads, -1)
        return rms_norm(gated.view(groups), weights.norm.view(shape.key_heads, -1), shape.eps).view(
            rows, -1
        )

    def _keep_drafted(self, own: _LayerStates, plan: RecurrentPlan, fresh: NodeInputs) -> None:
        """Keeps the inputs of drafted nodes until commit."""
        for (low, high, slot, given), earlier in zip(
            plan.drafted,
            (n for n, s in zip(plan.earlier, plan.slots, strict=True) if s >= 0),
            strict=True,
        ):
            self._given[slot] = given
            before = own.drafted.pop(slot, None) if earlier else None
            new = fresh.rows(slice(low, high)).clone()
            if low == high and before is None:
                own.drafted.pop(slot, None)
                continue
            own.drafted[slot] = new if before is None else NodeInputs.joined([before, new])

    # --- between passes -----------------------------------------------------------------------------

    def update(self, updates: Sequence[StateUpdate]) -> None:
        """Makes updates in order; neighbouring ones that write to different slots together."""
        pending: list[StateAdvance] = []
        written: set[int] = set()
        for item in updates:
            targets = {item.target} if isinstance(item, StateCopy) else _targets(item)
            if isinstance(item, StateCopy) or targets & written:
                self._advance(pending)
                pending, written = [], set()
            if isinstance(item, StateCopy):
                self._copy(item)
            else:
                pending.append(item)
                written |= targets
        self._advance(pending)

    def _copy(self, item: StateCopy) -> None:
        for own in self._layers.values():
            own.windows[item.target] = own.windows[item.source]
            own.states[item.target] = own.states[item.source]

    def _advance(self, items: Sequence[StateAdvance]) -> None:
        """Replays accepted nodes from their inputs."""
        if not items:
            return
        kept = [(*item.snapshots, (len(item.nodes), item.slot)) for item in items]
        levels = path_levels([len(item.nodes) for item in items], kept)
        rows = [torch.tensor(item.nodes) - self._given[item.slot] for item in items]
        slots = [item.slot for item in items]
        for own in self._layers.values():
            parts = [
                own.drafted.pop(item.slot).rows(r) for item, r in zip(items, rows, strict=True)
            ]
            for part, copies, slot in zip(parts, kept, slots, strict=True):
                inputs = torch.cat([own.windows[slot], part.conv])
                for count, target in copies:
                    own.windows[target] = inputs[count : count + self.shape.kernel - 1]
            if self.shape.heads:
                self.recurrence(own.states, slots, levels, NodeInputs.joined(parts), None, 0)


def _targets(item: StateAdvance) -> set[int]:
    """The slots that an update writes to."""
    return {item.slot, *(slot for _, slot in item.snapshots)}


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Rows [rows, heads, width] divided by their lengths."""
    squares = (x * x).view(-1, x.shape[-1])
    return x * row_sum(squares).add_(1e-6).rsqrt_().view(*x.shape[:-1], 1)


def _convolve(inputs: torch.Tensor, taps: torch.Tensor, weights: RecurrentWeights) -> torch.Tensor:
    """The convolution of rows, [rows, channels]; taps [rows, kernel] say which inputs each reads."""
    mixed = inputs[taps[:, 0]] * weights.conv[:, 0]
    for place in range(1, taps.shape[1]):
        mixed += inputs[taps[:, place]] * weights.conv[:, place]
    return mixed if weights.conv_bias is None else mixed + weights.conv_bias
