"""A fixed cost curve: with the same curve, `auto` drafts the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outstride.bench import result as results
from outstride.errors import InvalidParams
from outstride.policy.cost_model import CostModel

if TYPE_CHECKING:
    from outstride.llm import LLM


def read(text: str) -> dict[int, float]:
    """Seconds by nodes, from `1=6,8=10` (milliseconds) or from a result file that has a cost curve."""
    if Path(text).suffix == ".json":
        found = results.read(text).settings.get("cost") or {}
        curve = {int(nodes): float(seconds) for nodes, seconds in found.items()}
    else:
        try:
            pairs = (part.split("=") for part in text.split(","))
            curve = {int(nodes): float(value) / 1e3 for nodes, value in pairs}
        except ValueError:
            raise InvalidParams(
                f"a cost curve is written 1=6,8=10 (milliseconds by nodes) or is a result file, not "
                f"{text!r}"
            ) from None
    try:
        CostModel(curve)
    except ValueError as error:
        raise InvalidParams(f"{text}: {error}") from None
    return curve


def freeze(llm: LLM, curve: dict[int, float]) -> None:
    """Sets an engine's cost curve; it is not measured any more."""
    llm.engine.cost = CostModel(curve, frozen=True)


def of(llm: LLM) -> dict[str, float]:
    """The engine's cost curve; empty if no method has needed one."""
    cost = llm.engine.cost
    return {} if cost is None else {str(n): round(s, 6) for n, s in cost.knots.items()}
