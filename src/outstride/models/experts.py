"""`Experts`: the mixture of experts that the config of a checkpoint describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.ops.routing import Routing


@dataclass(frozen=True, slots=True)
class Experts:
    """Which layers have experts, how many, of which size, and how tokens are routed to them.

    shared: the inner size of the shared expert that all tokens use; 0 for none.
    bias: whether a stored bias is added to the router's scores.
    shared_gate: whether the shared expert is scaled by a sigmoid of a product with the token.
    router_bias: whether one is added to its logits.
    projection_bias: whether the products of experts have biases.
    """

    layers: tuple[bool, ...]
    count: int
    size: int
    routing: Routing
    shared: int = 0
    bias: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    projection_bias: bool = False

    def __post_init__(self) -> None:
        routing = self.routing
        if not 0 < routing.per_token <= self.count:
            raise CorruptModel(f"a token cannot choose {routing.per_token} of {self.count} experts")
        if routing.groups < 1 or self.count % routing.groups:
            raise CorruptModel(f"{self.count} experts cannot form {routing.groups} groups")
        eligible = self.count // routing.groups * routing.groups_kept
        if not 0 < routing.groups_kept <= routing.groups or eligible < routing.per_token:
            raise CorruptModel(
                f"a token cannot choose {routing.per_token} experts from {routing.groups_kept} of "
                f"{routing.groups} groups"
            )


def qwen3_moe(config: Mapping[str, Any], layers: int) -> Experts | None:
    """The experts of Qwen3-MoE; None if no layer has any."""
    dense = set(config.get("mlp_only_layers") or ())
    every = int(config.get("decoder_sparse_step") or 1)
    sparse = tuple(i not in dense and (i + 1) % every == 0 for i in range(layers))
    if not _count(config) or not any(sparse):
        return None
    return Experts(
        layers=sparse,
        count=_count(config),
        size=int(config["moe_intermediate_size"]),
        routing=_softmax(config),
    )


def qwen2_moe(config: Mapping[str, Any], layers: int) -> Experts | None:
    """The experts of Qwen2-MoE: those of Qwen3-MoE, and a shared one with a sigmoid gate."""
    found = qwen3_moe(config, layers)
    if found is None:
        return None
    shared = int(config["shared_expert_intermediate_size"])
    return replace(found, shared=shared, shared_gate=True)


def mixtral(config: Mapping[str, Any], layers: int) -> Experts:
    """The experts of Mixtral; the weights of a token's experts always sum to one."""
    return Experts(
        layers=(True,) * layers,
        count=_count(config),
        size=int(config["intermediate_size"]),
        routing=Routing(per_token=int(config["num_experts_per_tok"]), normalized=True),
    )


def qwen3_next(config: Mapping[str, Any], layers: int) -> Experts | None:
    """The experts of Qwen3-Next and Qwen3.5; None for dense models."""
    if not config.get("num_experts"):
        return None
    dense = set(config.get("mlp_only_layers") or ())
    every = int(config.get("decoder_sparse_step") or 1)
    return Experts(
        layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
        count=_count(config),
        size=int(config["moe_intermediate_size"]),
        routing=Routing(
            per_token=int(config["num_experts_per_tok"]),
            normalized=bool(config.get("norm_topk_prob", True)),
        ),
        shared=int(config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )


def granite_hybrid(config: Mapping[str, Any], layers: int) -> Experts | None:
    """The experts of Granite 4-H: a softmax over the chosen ones; None for dense models."""
    if not config.get("num_local_experts"):
        return None
    return Experts(
        layers=(True,) * layers,
        count=int(config["num_local_experts"]),
        size=int(config["expert_intermediate_size"]),
        routing=Routing(per_token=int(config["num_experts_per_tok"]), normalized=True),
        shared=int(config["intermediate_size"]),
    )


def olmoe(config: Mapping[str, Any], layers: int) -> Experts:
    """The experts of OLMoE."""
    return Experts(
        layers=(True,) * layers,
        count=_count(config),
        size=int(config["intermediate_size"]),
        routing=_softmax(config),
    )


def deepseek(config: Mapping[str, Any], layers: int) -> Experts | None:
    """The experts of DeepSeek-V2 (softmax) and of V3 and GLM-4.7-Flash (sigmoid and groups)."""
    first = int(config.get("first_k_dense_replace") or 0)
    count, size = int(config["n_routed_experts"]), int(config["moe_intermediate_size"])
    if first >= layers or not count:
        return None
    sigmoid = config["model_type"] != "deepseek_v2"
    groups = int(config.get("n_group") or 1)
    if not sigmoid and config.get("topk_method") != "greedy" and groups > 1:
        raise UnsupportedModel("DeepSeek-V2 with groups of experts is not supported")
    return Experts(
        layers=tuple(layer >= first for layer in range(layers)),
        count=count,
        size=size,
        routing=Routing(
            per_token=int(config["num_experts_per_tok"]),
            sigmoid=sigmoid,
            normalized=sigmoid and bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            groups=groups if sigmoid else 1,
            groups_kept=int(config.get("topk_group") or 1) if sigmoid else 1,
        ),
        shared=size * int(config.get("n_shared_experts") or 0),
        bias=sigmoid,
    )


def gpt_oss(config: Mapping[str, Any], layers: int) -> Experts:
    """The experts of gpt-oss: a softmax over the chosen ones, biases everywhere."""
    return Experts(
        layers=(True,) * layers,
        count=_count(config),
        size=int(config["intermediate_size"]),
        routing=Routing(per_token=int(config["num_experts_per_tok"]), normalized=True),
        router_bias=True,
        projection_bias=True,
    )


def _count(config: Mapping[str, Any]) -> int:
    """How many experts there are; newer versions of transformers use another name."""
    newer = config.get("num_local_experts")
    return int(config["num_experts"] if newer is None else newer)


def _softmax(config: Mapping[str, Any]) -> Routing:
    return Routing(
        per_token=int(config["num_experts_per_tok"]),
        normalized=bool(config.get("norm_topk_prob", False)),
    )


def lladamoe(config: Mapping[str, Any], layers: int) -> Experts:
    """The published code takes softmax weights with the bias added, whatever the config says."""
    sparse = tuple(bool(flag) for flag in config["moe_layer_freq"])
    if len(sparse) < layers:
        raise ValueError(f"moe_layer_freq names {len(sparse)} of {layers} layers")
    return Experts(
        layers=sparse[:layers],
        count=_count(config),
        size=int(config["expert_intermediate_size"]),
        routing=Routing(per_token=int(config["num_experts_per_tok"]), biased=True),
        shared=int(config.get("shared_expert_intermediate_size") or 0),
        bias=bool(config.get("moe_router_enable_expert_bias")),
    )


def llada2(config: Mapping[str, Any], layers: int) -> Experts | None:
    """The experts of LLaDA2; None if all layers are dense."""
    first, size = int(config.get("first_k_dense_replace") or 0), config["moe_intermediate_size"]
    if first >= layers:
        return None
    per_token = int(config["num_experts_per_tok"])
    return Experts(
        layers=tuple(layer >= first for layer in range(layers)),
        count=_count(config),
        size=int(size),
        routing=Routing(
            per_token=per_token,
            sigmoid=True,
            normalized=per_token > 1,
            scale=float(config.get("routed_scaling_factor", 2.5)),
            groups=int(config.get("n_group", 8)),
            groups_kept=int(config.get("topk_group", 4)),
        ),
        shared=int(size) * int(config.get("num_shared_experts") or 0),
        bias=True,
    )
