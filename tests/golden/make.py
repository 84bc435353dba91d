"""Writes the golden texts of a weights format anew: `python tests/golden/make.py int8 "what changed"`.

The line goes into CHANGELOG.md as well, word for word, or `tests/test_golden.py` fails. Texts that are
what they were need no line; texts that changed need one that was not used before.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from outstride import LLM, SamplingParams

MODEL = "smollm2"
FILES = {
    weights: Path(__file__).with_name(f"{MODEL}.{weights}.json") for weights in ("int8", "int4")
}
"""By weights format."""
SHORT = 32
PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that counts the words of a text.",
    "Translate into French: The cat sleeps on the warm stone wall.",
    "List five animals and what they eat.",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 11, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "seed": 3, "min_p": 0.05, "frequency_penalty": 0.4},
)


def operations(llm: LLM) -> str:
    """The arithmetic without the instruction set: all of them give the same bits."""
    return re.sub(r"^cpu [\w-]+ ", "cpu ", llm.model.ops.name)


def asked() -> list[tuple[str, dict[str, Any]]]:
    """Every prompt under every sampling."""
    return [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]


def answers(llm: LLM, method: str) -> list[dict[str, Any]]:
    """What the model says, all in one batch."""
    cases = asked()
    params = [SamplingParams(max_tokens=SHORT, **sampling) for _, sampling in cases]
    results = llm.chat([prompt for prompt, _ in cases], params, method=method)
    return [
        {
            "prompt": prompt,
            "sampling": sampling,
            "text": found.text,
            "tokens": " ".join(map(str, found.token_ids)),
        }
        for (prompt, sampling), found in zip(cases, results, strict=True)
    ]


def digest(texts: list[dict[str, Any]]) -> str:
    """A name for these texts."""
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def renewed(kept: dict[str, Any] | None, texts: list[dict[str, Any]], change: str) -> list[Any]:
    """The history with one more line, if the texts are not what they were."""
    history = list(kept["history"]) if kept else []
    if history and history[-1]["digest"] == digest(texts):
        return history
    if not change.strip() or change in {entry["change"] for entry in history}:
        raise SystemExit("the texts changed: say why, in a line that the changelog has, too")
    return [*history, {"change": change.strip(), "digest": digest(texts)}]


def main() -> None:
    weights, *change = sys.argv[1:]
    file = FILES[weights]
    kept = json.loads(file.read_text()) if file.exists() else None
    with LLM(MODEL, weights=weights) as llm:
        texts = answers(llm, "plain")
        values = {
            "model": MODEL,
            "weights": llm.model.digest,
            "operations": operations(llm),
            "history": renewed(kept, texts, " ".join(change)),
            "texts": texts,
        }
    file.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
