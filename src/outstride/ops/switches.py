"""`Switches`: how the layers of a model differ from those of Llama.

All defaults are Llama's. A backend names the switches that it runs (`unusual_layers`); a model that
needs another one is refused with the name of what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from outstride.ops.recurrent import RecurrentShape

SILU = "silu"
GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeWeights:
    """RoPE frequencies of some layers (windowed layers, draft heads) that differ from the model's."""

    frequencies: tuple[float, ...]
    """[head_dim / 2]"""
    scale: float = 1.0
    """Factor of all cosines and sines."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / interval)) (Ministral 3)."""

    beta: float
    interval: int


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The experts of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), both clamped to `limit`."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Sizes of the layers without a window, where they differ from those with one (Gemma 4)."""

    head_dim: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention over latent KV (MLA): one row of rank + rope_dim values per position.

    query_rank: the rank of the query projection; None: it is one matrix.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Switches:
    """How the layers of a model differ from those of Llama."""

    activation: str = SILU
    """Of the MLP: SILU or GELU_TANH."""
    attention_scale: float | None = None
    """The factor of attention logits; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Attention logits x become cap * tanh(x / cap)."""
    logit_softcap: float | None = None
    """Logits of the LM head likewise."""
    pre_norms: bool = True
    """Whether there are norms before attention and before the MLP."""
    post_norms: bool = False
    """Whether there are norms after attention and after the MLP, before the residual connection."""
    sinks: bool = False
    """Whether each query head has an attention sink: a logit of a key without a value."""
    local_rope: RopeWeights | None = None
    """RoPE of the layers with a window; None: as in all others."""
    query_growth: QueryGrowth | None = None
    value_norms: bool = False
    """Whether values are normalised per head, without a weight."""
    full_attention: FullAttention | None = None
    kv_layers: tuple[int, ...] | None = None
    """For each layer the one whose KV it reads; None: its own."""
    per_layer_inputs: int = 0
    """The width of the embedding that each layer reads for itself (Gemma 4); 0: there is none."""
    layer_scales: bool = False
    """Whether the hidden states that leave a layer are multiplied by a stored number."""
    expert_activation: ClampedSwiglu | None = None
    """Of experts; None: as in the MLP."""
    latent: Latent | None = None
    recurrent: RecurrentShape | None = None
    """The layers that have a recurrent state and no attention."""
    attention_gate: bool = False
    """Whether the output of attention is multiplied with the sigmoid of a gate."""


LLAMA = Switches()
NAMES = {
    "activation": "an MLP with GELU",
    "attention_scale": "its own scale of attention logits",
    "attention_softcap": "soft caps of attention logits",
    "logit_softcap": "a soft cap of logits",
    "pre_norms": "layers without norms before attention",
    "post_norms": "norms after attention and MLP",
    "sinks": "attention sinks",
    "local_rope": "another RoPE in layers with a window",
    "query_growth": "queries that grow with their position",
    "value_norms": "norms of values",
    "full_attention": "heads of two sizes",
    "kv_layers": "layers that share their KV",
    "per_layer_inputs": "an embedding per layer",
    "layer_scales": "scaled outputs of layers",
    "expert_activation": "experts with a clamped activation",
    "latent": "latent attention (MLA)",
    "recurrent": "layers with a recurrent state",
    "attention_gate": "attention with an output gate",
}
"""What a backend says that it cannot run, by the name of the switch."""
