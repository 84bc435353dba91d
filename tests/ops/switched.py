"""Changes to a tiny decoder that need switches of the kernels beyond Llama's layers."""

from __future__ import annotations

from typing import Any

from outstride.ops.switches import GELU_TANH, QueryGrowth, RopeWeights, Switches

LOCAL = RopeWeights(tuple(0.7**i for i in range(8)), 1.1)
SWITCHED: dict[str, dict[str, Any]] = {
    "norms on both sides, GELU, soft caps, two ropes": {
        "switches": Switches(
            activation=GELU_TANH,
            attention_scale=0.3,
            attention_softcap=3.0,
            logit_softcap=4.0,
            post_norms=True,
            local_rope=LOCAL,
        ),
        "windows": (5, None),
        "head_norms": True,
        "tied": True,
    },
    "norms after, over all heads": {
        "switches": Switches(pre_norms=False, post_norms=True),
        "head_norms": True,
        "wide_norms": True,
    },
    "sinks": {"switches": Switches(sinks=True), "windows": (5, None)},
    "growing queries": {"switches": Switches(query_growth=QueryGrowth(0.3, 8))},
}
