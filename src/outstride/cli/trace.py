"""Shows which pass and drafter each token came from, and log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from outstride.cli import screen
from outstride.core.sequence import Provenance
from outstride.results import Completion

Decode = Callable[[Sequence[int]], str]

_STYLES = {
    "drafted": "black on green",
    "bonus": "black on yellow",
    "plain": "",
    "unmasked": "",
    "given": "dim",
}
_MARKS = {
    "drafted": ("[", "]"),
    "bonus": ("(", ")"),
    "plain": ("", ""),
    "unmasked": ("", ""),
    "given": ("{", "}"),
}
"""Marks around the text of a token, for output without colours."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def _token_texts(decode: Decode, rows: Sequence[Provenance]) -> list[tuple[str, Provenance]]:
    """The text of each token; tokens that end within a UTF-8 character are joined with the next."""
    found, waiting = [], list[int]()
    for row in rows:
        waiting.append(row.token)
        text = decode(waiting)
        if text.endswith(_INCOMPLETE) and len(waiting) < 4:
            continue
        found.append((screen.clean(text) or f"‹{row.token}›", row))
        waiting = []
    if waiting:
        found.append((decode(waiting), rows[-1]))
    return found


def show(decode: Decode, output: Completion) -> None:
    """Prints the answer in colours, and a table of its passes."""
    console, rows = screen.console(), output.trace or []
    coloured = console.is_terminal and not console.no_color
    text = Text()
    for kind, group in groupby(_token_texts(decode, rows), key=lambda item: item[1].kind):
        for shown, _ in group:
            if coloured or kind == "plain":
                text.append(shown, style=_STYLES[kind])
            else:
                left, right = _MARKS[kind]
                text.append(f"{left}{shown}{right}")
    console.print()
    console.print(text, soft_wrap=not coloured)
    console.print()
    console.print(_legend(rows, coloured=coloured))
    console.print()
    table = Table(box=None, pad_edge=False)
    for name in ("pass", "tokens", "drafted"):
        table.add_column(name, justify="right")
    table.add_column("from")
    table.add_column("text", overflow="fold")
    in_time = sorted(rows, key=lambda row: row.step)  # masked models unmask in another order
    for step, batch in groupby(in_time, key=lambda row: row.step):
        passed = list(batch)
        sources = dict.fromkeys(row.source for row in passed if row.kind == "drafted")
        table.add_row(
            str(step),
            str(len(passed)),
            str(sum(row.kind == "drafted" for row in passed)),
            ", ".join(sources) or "-",
            Text(screen.token_text(decode([row.token for row in passed]))),
        )
    console.print(table)
    console.print()


def _legend(rows: Sequence[Provenance], *, coloured: bool) -> Text:
    meanings = {
        "drafted": "drafted, then accepted by the model",
        "bonus": "the model's own token after accepted drafts",
        "plain": "no draft in this pass",
        "unmasked": "a mask that was filled in",
        "given": "part of the given text",
    }
    lines = []
    for kind, meaning in meanings.items():
        count = sum(row.kind == kind for row in rows)
        if not count and kind in ("unmasked", "given"):
            continue
        left, right = ("", "") if coloured else _MARKS[kind]
        name = (f"{left}{kind}{right}", _STYLES[kind] if coloured else "")
        lines.append(Text.assemble(name, f" {count}: {meaning}"))
    return Text("\n").join(lines)


def show_logprobs(decode: Decode, output: Completion) -> None:
    """Prints a table of tokens with their log-probabilities under the raw logits."""
    table = Table(box=None, pad_edge=False)
    table.add_column("token")
    table.add_column("logprob", justify="right")
    table.add_column("most probable")
    for row in output.logprobs or ():
        top = "  ".join(
            f"{screen.token_text(decode([token])) or token!s} {value:.3f}"
            for token, value in row.top.items()
        )
        own = screen.token_text(decode([row.token_id])) or f"‹{row.token_id}›"
        table.add_row(Text(own), f"{row.logprob:.3f}", Text(top))
    console = screen.console()
    console.print()
    console.print(table)
    console.print()
