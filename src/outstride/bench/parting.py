"""Where two answers part: tokens first, then the log-probabilities behind them, to the last bit."""

from __future__ import annotations

from outstride.bench import look
from outstride.bench.proof import Divergence, Side
from outstride.bench.trial import PLAIN, Trial
from outstride.results import Completion, Result


def _parting(plain: Completion, other: Completion) -> int | None:
    """At which output token two answers part; None if they are the same."""
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    for i, (a, b) in enumerate(pairs):
        if a != b:
            return i
    if len(plain.token_ids) != len(other.token_ids):
        return min(len(plain.token_ids), len(other.token_ids))
    if (plain.text, plain.finish_reason) != (other.text, other.finish_reason):
        return len(plain.token_ids)
    return None


def _bits(plain: Completion, other: Completion) -> int | None:
    """At which output token the log-probabilities of equal answers part, if both have them."""
    rows = zip(plain.logprobs or (), other.logprobs or (), strict=False)
    for i, (a, b) in enumerate(rows):
        if (a.token_id, a.logprob) != (b.token_id, b.logprob):
            return i
    return None


def _diverge(
    trial: Trial, i: int, plain: Completion, other: Completion, at: int, who: str, company: str
) -> Divergence:
    said = plain.token_ids[:at]
    tokens = [c.token_ids[at] if at < len(c.token_ids) else None for c in (plain, other)]
    row = None
    if trial.report.baseline == PLAIN and any(t is not None for t in tokens):
        row = look.logits_after(trial.llm, trial.tokens[i] + said)

    def side(token: int | None) -> Side:
        if token is None:
            return Side(None, "", None, None)
        text = trial.llm.tokenizer.decode([token], skip_special=False)
        if row is None:  # on a canvas, the logits depend on the step
            return Side(token, text, None, None)
        return Side(token, text, float(row[token]), int((row > row[token]).sum()))

    left, right = side(tokens[0]), side(tokens[1])
    gap = None
    if left.logit is not None and right.logit is not None:
        gap = left.logit - right.logit
    return Divergence(
        position=at,
        sample=plain.index,
        company=company,
        method=who,
        plain=left,
        other=right,
        gap=gap,
        before=trial.llm.tokenizer.decode(said)[-60:],
        finish=(plain.finish_reason, other.finish_reason),
    )


def _blur(
    trial: Trial, plain: Completion, other: Completion, at: int, who: str, company: str
) -> Divergence:
    """The same tokens from other logits."""
    assert plain.logprobs is not None
    assert other.logprobs is not None
    rows = plain.logprobs[at], other.logprobs[at]
    sides = [
        Side(
            r.token_id,
            trial.llm.tokenizer.decode([r.token_id], skip_special=False),
            r.logprob,
            None,
        )
        for r in rows
    ]
    return Divergence(
        position=at,
        sample=plain.index,
        company=company,
        method=who,
        plain=sides[0],
        other=sides[1],
        gap=rows[0].logprob - rows[1].logprob,
        before=trial.llm.tokenizer.decode(plain.token_ids[:at])[-60:],
        finish=(plain.finish_reason, other.finish_reason),
        bits=True,
    )


def compare(trial: Trial, i: int, other: Result, who: str, company: str) -> None:
    """Enters into a case whether a result is the reference, and if not, where they part."""
    case, plain = trial.report.cases[i], trial.references[i]
    if plain.error is not None and other.error is not None:
        case.error = str(plain.error)
        return
    if plain.error is not None or other.error is not None:
        case.equal = False
        name = trial.report.baseline if plain.error is not None else who
        case.failure = f"only {name} failed, in company {company!r}: {plain.error or other.error}"
        return
    for ours, theirs in zip(plain.outputs, other.outputs, strict=True):
        at = _parting(ours, theirs)
        if at is not None:
            case.equal = False
            case.divergences.append(_diverge(trial, i, ours, theirs, at, who, company))
        elif trial.exact and (at := _bits(ours, theirs)) is not None:
            case.equal = False
            case.divergences.append(_blur(trial, ours, theirs, at, who, company))
