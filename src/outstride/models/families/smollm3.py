"""SmolLM3."""

from __future__ import annotations

from outstride.models.families.family import (
    Config,
    Family,
    Windows,
    listed_windows,
    window_size,
)


def _smollm3_rope_layers(config: Config, layers: int) -> tuple[bool, ...]:
    listed = config.get("no_rope_layers")  # 1 for layers with RoPE, in spite of its name
    if listed is None:
        interval = int(config.get("no_rope_layer_interval") or 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(listed) < layers:
        raise ValueError(f"no_rope_layers names {len(listed)} of {layers} layers")
    return tuple(bool(flag) for flag in listed[:layers])


def _smollm3_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    if (size := window_size(config, None)) is None:
        return (None,) * layers
    sliding = listed_windows(config, layers)
    if sliding is None:
        sliding = [not rope for rope in rope_layers]
    return tuple(size if flag else None for flag in sliding)


FAMILIES = {
    "smollm3": Family(
        classes=("SmolLM3ForCausalLM",),
        rope_theta=2e6,
        tied=True,
        attention_bias=True,
        mlp_bias=True,
        rope_layers=_smollm3_rope_layers,
        windows=_smollm3_windows,
    ),
}
