"""Weights in float32, as they are handed to a backend: of a model, of draft heads, of LoRA adapters.

A backend converts them to its own format. Matrices are [out, in], as in checkpoints; those that share
their input are concatenated to one matrix. `A` stands for the number of auxiliary layers of a draft
head: the layers of the target whose input hidden states it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from outstride.core.draft_heads import BigramTable
from outstride.core.graph import IntArray
from outstride.ops.recurrent import RecurrentWeights
from outstride.ops.routing import ExpertShape, Routing
from outstride.ops.switches import LLAMA, NAMES, ClampedSwiglu, RopeWeights, Switches


class ModelShape(Protocol):
    """The sizes of a model that its operations need."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def windows(self) -> Sequence[int | None]: ...
    @property
    def rope_layers(self) -> Sequence[bool]: ...
    @property
    def frequencies(self) -> Sequence[float]: ...
    @property
    def rope_scale(self) -> float: ...
    @property
    def experts(self) -> ExpertShape | None: ...
    @property
    def wide_norms(self) -> bool: ...
    @property
    def clip(self) -> float | None: ...
    @property
    def switches(self) -> Switches: ...


def unusual_layers(shape: ModelShape, runs: Collection[str] = ()) -> str | None:
    """What a model's layers have beyond dense Llama layers; None if they have nothing else.

    runs: what a backend runs nevertheless: "experts", "wide_norms", "clip" and fields of `Switches`.
    """
    found = {
        "layers with a mixture of experts": shape.experts is not None and "experts" not in runs,
        "query and key norms over all heads": shape.wide_norms and "wide_norms" not in runs,
        "clipped queries, keys and values": shape.clip is not None and "clip" not in runs,
    }
    for field, name in NAMES.items():
        found[name] = field not in runs and getattr(shape.switches, field) != getattr(LLAMA, field)
    return next((name for name, present in found.items() if present), None)


def attention_scale(shape: ModelShape, layer: int = 0) -> float:
    """The factor of the attention logits of a layer."""
    scale = shape.switches.attention_scale
    return head_sizes(shape, layer)[1] ** -0.5 if scale is None else scale


def head_sizes(shape: ModelShape, layer: int) -> tuple[int, int]:
    """The number of KV heads and the size of a head of a layer."""
    full = shape.switches.full_attention
    if full is not None and layer < shape.layers and shape.windows[layer] is None:
        return full.kv_heads, full.head_dim
    return shape.kv_heads, shape.head_dim


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer, and the router that chooses among them."""

    routing: Routing
    router: torch.Tensor
    """[experts, hidden]"""
    bias: torch.Tensor | None
    """[experts]: added to the scores by which experts are chosen."""
    gate_up: torch.Tensor
    """[experts, 2 * inner, hidden]"""
    down: torch.Tensor
    """[experts, hidden, inner]"""
    shared_gate: torch.Tensor | None = None
    """[hidden]: the shared expert is scaled by a sigmoid of the product with it."""
    router_bias: torch.Tensor | None = None
    """[experts]: added to the router's logits."""
    gate_up_bias: torch.Tensor | None = None
    """[experts, 2 * inner]"""
    down_bias: torch.Tensor | None = None
    """[experts, hidden]"""
    activation: ClampedSwiglu | None = None
    """None: SiLU."""


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The projections of latent attention (MLA). Keys and values are never expanded.

    The rows that expand a latent row to keys are absorbed into queries, and those that expand it to
    values are applied after attention.
    """

    queries: torch.Tensor
    """[heads * (nope_dim + rope_dim), hidden or query_rank]"""
    query_down: torch.Tensor | None
    """[query_rank, hidden]"""
    query_norm: torch.Tensor | None
    """[query_rank]"""
    kv_down: torch.Tensor
    """[rank + rope_dim, hidden]"""
    kv_norm: torch.Tensor
    """[rank]"""
    keys_up: torch.Tensor
    """[heads, rank, nope_dim]"""
    values_up: torch.Tensor
    """[heads, value_dim, rank]"""


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """The embedding that each layer reads for itself (Gemma 4)."""

    embedding: torch.Tensor
    """[vocabulary, layers * width], scaled already"""
    projection: torch.Tensor
    """[layers * width, hidden]: of the hidden states before the first layer"""
    norm: torch.Tensor
    """[width]"""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one transformer layer.

    In a layer with experts, the MLP (`gate_up`, `down`) is the shared expert, which all rows go
    through; it is empty if there is none. Only backends that support them are given `experts` and
    `clip`.
    """

    attention_norm: torch.Tensor
    """[hidden]; empty in layers without a norm before attention."""
    qkv: torch.Tensor
    """[(heads + 2 * kv_heads) * head_dim, hidden]; EAGLE-3 reads [.., 2 * hidden]. With an output gate
    of attention, its [heads * head_dim] rows come last."""
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    """[head_dim], or one weight for each column of all heads."""
    key_norm: torch.Tensor | None
    output: torch.Tensor
    """[hidden, heads * head_dim]"""
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    """[hidden]; empty in layers without a norm before the MLP."""
    gate_up: torch.Tensor
    """[2 * inner, hidden]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[hidden, inner]"""
    down_bias: torch.Tensor | None
    experts: ExpertWeights | None = None
    clip: float | None = None
    """Queries, keys and values are clamped to [-clip, clip]."""
    attention_post_norm: torch.Tensor | None = None
    """[hidden]: norm of what attention adds to the hidden states."""
    mlp_post_norm: torch.Tensor | None = None
    """[hidden]: norm of what the MLP adds to them."""
    sinks: torch.Tensor | None = None
    """[heads]: a logit of each query head that takes part in the softmax and has no value."""
    per_layer_gate: torch.Tensor | None = None
    """[per_layer_inputs, hidden]"""
    per_layer_output: torch.Tensor | None = None
    """[hidden, per_layer_inputs]"""
    per_layer_norm: torch.Tensor | None = None
    """[hidden]"""
    scale: float = 1.0
    """The factor of the hidden states that leave the layer."""
    latent: LatentWeights | None = None
    """Latent attention; `qkv` is empty then."""
    recurrent: RecurrentWeights | None = None
    """The mixer of a recurrent layer, which has no attention."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything that a backend is built from. It may take tensors over, or convert and drop them."""

    shape: ModelShape
    embedding: torch.Tensor
    """[vocab_size, hidden]"""
    layers: list[LayerWeights]
    norm: torch.Tensor
    """[hidden]: the final norm, before the LM head."""
    head: torch.Tensor | None
    """[vocab_size, hidden]: the LM head; None: the embedding is used."""
    slots: int
    page_size: int
    features: tuple[int, ...] = ()
    """The layers whose input hidden states are stored next to the KV cache."""
    per_layer: PerLayerWeights | None = None
    state_slots: int = 0
    """How many recurrent states there are."""


SKIP_FIRST = -1
"""A window: everything but position 0. EAGLE reads the hidden state before each token, and there is
none before the first one."""


@dataclass(frozen=True, slots=True)
class BlockDrafterWeights:
    """A draft head that drafts a block of positions in one pass (DFlash, and our own recipe).

    The hidden states that enter `aux_layers` are concatenated, normalised with `aux_norm`, fused to one
    row, and normalised with `fusion_norm`. Each layer projects that row to its own keys and values,
    which go to the KV cache of the draft head.
    """

    aux_layers: tuple[int, ...]
    aux_norm: torch.Tensor
    """[A * hidden]"""
    fusion: torch.Tensor
    """[hidden, A * hidden]"""
    fusion_norm: torch.Tensor
    """[hidden]"""
    layers: list[LayerWeights]
    norm: torch.Tensor
    """[hidden]: before the LM head."""
    vocabulary: IntArray
    """[tokens], rising: the tokens that it can draft."""
    window: int | None = None
    """How many positions back it attends: as far as its training texts reached."""
    lm_head: torch.Tensor | None = None
    """[tokens, hidden]; None: the rows of the model's LM head."""
    rope: RopeWeights | None = None
    """None: as the model's."""
    bigram: BigramTable | None = None
    """For backends that find the likeliest chain themselves; None: they do not."""


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A draft head that drafts token by token (EAGLE, EAGLE-3). Whatever is None is left out.

    A node's input is its token's embedding and the hidden state of the node before it: fused from the
    model's hidden states if the model has computed that node, its own output if it drafted it.
    """

    aux_layers: tuple[int, ...]
    aux_norm: torch.Tensor | None
    """[A * hidden]: norm of the model's hidden states."""
    fusion: torch.Tensor | None
    """[hidden, A * hidden]; None: there is one auxiliary layer."""
    layer: LayerWeights
    norm: torch.Tensor | None
    """[hidden]: before the LM head."""
    vocabulary: IntArray
    """[tokens], rising: the tokens that it can draft."""
    lm_head: torch.Tensor | None = None
    """[tokens, hidden]; None: the rows of the model's LM head."""
    rope: RopeWeights | None = None
    """None: as the model's."""
    embedding: torch.Tensor | None = None
    """[vocab_size, hidden]; None: the model's."""
    input_projection: torch.Tensor | None = None
    """[hidden, 2 * hidden]: of embedding and hidden state (EAGLE); None: the hidden state alone is the
    layer's input."""
    input_bias: torch.Tensor | None = None
    """[hidden]"""
    hidden_norm: torch.Tensor | None = None
    """[hidden]: norm of the layer's input, before the residual connection."""
    embedding_norm: torch.Tensor | None = None
    """[hidden]: norm of the embedding, which is concatenated before the hidden state as input of the
    queries, keys and values (EAGLE-3)."""
    feeds_back_normed: bool = False
    """Whether the next node reads the output after the final norm."""


@dataclass(frozen=True, slots=True)
class ResidualWeights:
    """x + down · silu(up · [norm(x), token] + bias). Whatever is None is left out."""

    norm: torch.Tensor | None
    """[hidden]"""
    up: torch.Tensor
    """[inner, hidden], or [inner, 2 * hidden] where the block reads a token as well."""
    bias: torch.Tensor | None
    """[inner]"""
    down: torch.Tensor | None
    """[hidden, inner]"""


@dataclass(frozen=True, slots=True)
class MedusaHeadWeights:
    """One Medusa head: residual blocks, a norm (None: none), and the matrix that scores tokens."""

    blocks: list[ResidualWeights]
    norm: torch.Tensor | None
    """[hidden]"""
    lm_head: torch.Tensor | None = None
    """[tokens, hidden]; None: rows of the model's LM head."""


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Heads on the hidden states that enter one layer. They have neither layers nor KV."""

    layer: int
    """The layer; the number of layers stands for the states that leave the last one."""
    hidden_norm: torch.Tensor | None
    """[hidden]: norm of those states; None: they are read as they are."""
    token_norm: torch.Tensor | None
    """[hidden]: norm of the embedding of the token before, which the first block of each head reads
    next to the state (Hydra); None: heads do not read tokens."""
    heads: list[MedusaHeadWeights]
    vocabulary: IntArray
    """[tokens], rising: the tokens that they can draft."""


DraftHeadWeights: TypeAlias = BlockDrafterWeights | EagleWeights | MedusaWeights


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What a LoRA adapter adds to a product: b · (a · x)."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What a LoRA adapter adds to the products of one layer; None: nothing."""

    qkv: LoraWeights | None = None
    output: LoraWeights | None = None
    gate_up: LoraWeights | None = None
    down: LoraWeights | None = None
