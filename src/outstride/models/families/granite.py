"""Granite 3: multipliers of embeddings, residual connections, attention and logits."""

from __future__ import annotations

from outstride.models.families.family import Config, Family
from outstride.ops.switches import Switches


def granite_config(config: Config) -> Config:
    """Folds the multiplier m of residual connections away.

    x + m * f(norm(x)) is m * (y + f(norm(m * y))) for y = x / m. A norm does not depend on the scale
    of its input, except for its epsilon. So hidden states are kept as y: embeddings are divided by m,
    and epsilon by m squared.
    """
    residual = float(config.get("residual_multiplier", 1.0))
    eps = float(config.get("rms_norm_eps", 1e-6))
    return {
        **config,
        "rms_norm_eps": eps / residual**2,
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)) / residual,
        "logit_scale": 1.0 / float(config.get("logits_scaling", 1.0)),
    }


def _switches(config: Config) -> Switches:
    return Switches(attention_scale=float(config.get("attention_multiplier", 1.0)))


FAMILIES = {
    "granite": Family(
        classes=("GraniteForCausalLM",),
        common_config=granite_config,
        attention_bias=True,
        mlp_bias=True,
        switches=_switches,
    ),
}
