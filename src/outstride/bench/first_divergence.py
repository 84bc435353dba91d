"""The first difference of two answers: in tokens, else in the bits of their log-probabilities."""

from __future__ import annotations

from outstride.bench import logits_inspection
from outstride.bench.proof import Divergence, Side
from outstride.bench.proof_state import PLAIN, ProofRun
from outstride.results import Completion, Result


def _first_difference(plain: Completion, other: Completion) -> int | None:
    """Index of the first output token that differs; None if the answers are equal."""
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    for i, (a, b) in enumerate(pairs):
        if a != b:
            return i
    if len(plain.token_ids) != len(other.token_ids):
        return min(len(plain.token_ids), len(other.token_ids))
    if (plain.text, plain.finish_reason) != (other.text, other.finish_reason):
        return len(plain.token_ids)
    return None


def _first_logprob_difference(plain: Completion, other: Completion) -> int | None:
    """Index of the first output token whose log-probabilities differ, if both answers have them."""
    rows = zip(plain.logprobs or (), other.logprobs or (), strict=False)
    for i, (a, b) in enumerate(rows):
        if (a.token_id, a.logprob) != (b.token_id, b.logprob):
            return i
    return None


def _token_divergence(
    proof: ProofRun,
    i: int,
    plain: Completion,
    other: Completion,
    at: int,
    method: str,
    batch_context: str,
) -> Divergence:
    common = plain.token_ids[:at]
    tokens = [c.token_ids[at] if at < len(c.token_ids) else None for c in (plain, other)]
    row = None
    if proof.report.baseline == PLAIN and any(t is not None for t in tokens):
        text = proof.tokens[i] + common
        row = logits_inspection.logits_after(proof.llm, text, proof.params.adapter)

    def side(token: int | None) -> Side:
        if token is None:
            return Side(None, "", None, None)
        text = proof.llm.tokenizer.decode([token], skip_special=False)
        if row is None:  # on a canvas, the logits depend on the step
            return Side(token, text, None, None)
        return Side(token, text, float(row[token]), int((row > row[token]).sum()))

    left, right = side(tokens[0]), side(tokens[1])
    difference = None
    if left.logit is not None and right.logit is not None:
        difference = left.logit - right.logit
    return Divergence(
        position=at,
        sample=plain.index,
        batch_context=batch_context,
        method=method,
        plain=left,
        other=right,
        logit_difference=difference,
        before=proof.llm.tokenizer.decode(common)[-60:],
        finish=(plain.finish_reason, other.finish_reason),
    )


def _logprob_divergence(
    proof: ProofRun, plain: Completion, other: Completion, at: int, method: str, batch_context: str
) -> Divergence:
    """The same tokens from different logits."""
    assert plain.logprobs is not None
    assert other.logprobs is not None
    rows = plain.logprobs[at], other.logprobs[at]
    sides = [
        Side(
            r.token_id,
            proof.llm.tokenizer.decode([r.token_id], skip_special=False),
            r.logprob,
            None,
        )
        for r in rows
    ]
    return Divergence(
        position=at,
        sample=plain.index,
        batch_context=batch_context,
        method=method,
        plain=sides[0],
        other=sides[1],
        logit_difference=rows[0].logprob - rows[1].logprob,
        before=proof.llm.tokenizer.decode(plain.token_ids[:at])[-60:],
        finish=(plain.finish_reason, other.finish_reason),
        bits=True,
    )


def compare(proof: ProofRun, i: int, other: Result, method: str, batch_context: str) -> None:
    """Records in a case whether a result equals the reference, and if not, where they diverge."""
    case, plain = proof.report.cases[i], proof.references[i]
    if plain.error is not None and other.error is not None:
        case.error = str(plain.error)
        return
    if plain.error is not None or other.error is not None:
        case.equal = False
        name = proof.report.baseline if plain.error is not None else method
        case.failure = (
            f"only {name} failed, in batch context {batch_context!r}: {plain.error or other.error}"
        )
        return
    for ours, theirs in zip(plain.outputs, other.outputs, strict=True):
        at = _first_difference(ours, theirs)
        if at is not None:
            case.equal = False
            case.divergences.append(
                _token_divergence(proof, i, ours, theirs, at, method, batch_context)
            )
        elif proof.exact and (at := _first_logprob_difference(ours, theirs)) is not None:
            case.equal = False
            case.divergences.append(
                _logprob_divergence(proof, ours, theirs, at, method, batch_context)
            )
