"""Planted faults: each is one that engines of this kind have had, and `outstride prove` finds it.

The command itself must notice, with nothing but its exit code and its report; and it must find
nothing in the same run without the fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outstride.accept.match import Match
from outstride.cache.pool import Moves, PagePool
from outstride.cli import main
from outstride.cli.context import Context
from outstride.core.contracts import Method, PassInput, PendingPass
from outstride.core.graph import FloatArray, IntArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import BlockTable, View
from outstride.core.sequence import Sequence as Running
from outstride.engine import logits_processors
from outstride.llm import LLM
from outstride.models.load import Loaded
from outstride.models.toy import Hashes, Toy
from outstride.ops import arithmetic, reference
from tests.bench.fake import ALPHABET, FakeTokenizer, make_llm
from tests.models.drive import random_decoder, tiny

SAMPLED = ("--temperature", "0.8", "--seed", "7")
Prove = Callable[..., dict[str, Any]]


def wrapped(model: Any) -> LLM:
    """A model behind the whole surface."""
    fields: dict[str, Any] = {
        "model": model,
        "tokenizer": FakeTokenizer(),
        "name": "tiny",
        "context": 512,
        "path": Path("tiny"),
    }
    return LLM(Loaded(**fields))


@pytest.fixture
def prove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Prove:
    """Runs the command on a model and returns its summary; the exit code is `code`."""
    texts = ["abcabcabcab", "the fox and the dog and the fox", "hello hello", "1, 2, 1, 2, 1"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"{text} {i}" for i in range(2) for text in texts))

    def run(
        *options: str,
        method: str = "ngram",
        llm: Callable[[], LLM] = make_llm,
        tokens: int = 40,
        limit: int = 4,
    ) -> dict[str, Any]:
        context = Context(load=lambda name, device, weights: llm())
        words = ["--prompts", str(file), "--limit", str(limit), "--max-tokens", str(tokens)]
        words += ["--ignore-eos", "--json"]
        code = main(["prove", "--method", method, *words, *options], context=context)
        values = json.loads(capsys.readouterr().out)
        contexts = {d["batch_context"] for s in values["samples"] for d in s["divergences"]}
        bits = {d["bits"] for s in values["samples"] for d in s["divergences"]}
        return {**values["summary"], "code": code, "contexts": contexts, "bits": bits}

    return run


@pytest.mark.parametrize(("method", "options"), [("ngram", SAMPLED), ("recycle", ())])
def test_nothing_planted(prove: Prove, method: str, options: Sequence[str]) -> None:
    found = prove(*options, method=method)
    assert (found["code"], found["equal"], found["integrity"]) == (0, True, None)
    assert found["mixed"]["preempted"] > 0, "there were no preemptions"


# --- a kernel whose rows depend on the batch ------------------------------------------------------


class Crowded(Toy):
    """Its logits change in their last bits with the number of rows in the pass."""

    rows = 0

    def forward(self, work: Sequence[PassInput]) -> PendingPass:
        self.rows = sum(len(item.proposal.graph) for item in work)
        return super().forward(work)

    def logits(self, tokens: IntArray, states: Hashes) -> FloatArray:
        found = super().logits(tokens, states)
        if self.rows > 8:
            found[:, ::2] *= 1 + 2**-22
        return found


def test_a_toy_whose_rows_depend_on_the_batch(prove: Prove) -> None:
    found = prove(llm=lambda: wrapped(Crowded(vocab_size=len(ALPHABET), pages=256, habit=6.0)))
    assert (found["code"], found["broken"]) == (1, True)
    assert True in found["bits"], "not one token changed, and it was noticed all the same"


@pytest.fixture
def decoder() -> Callable[[], LLM]:
    return lambda: wrapped(random_decoder(tiny(vocab_size=len(ALPHABET)), pages=128))


def test_a_decoder_with_nothing_planted(prove: Prove, decoder: Callable[[], LLM]) -> None:
    found = prove(llm=decoder, tokens=8, limit=2)
    assert (found["code"], found["equal"]) == (0, True)


def test_a_product_that_is_split_by_the_number_of_rows(
    prove: Prove, decoder: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = arithmetic.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        half = weight.shape[1] // 2
        if len(x) <= arithmetic.TILE or half == 0:
            return usual(x, weight, bias)
        left = usual(x[:, :half].contiguous(), weight[:, :half].contiguous(), bias)
        return left + usual(x[:, half:].contiguous(), weight[:, half:].contiguous())

    for module in (arithmetic, reference):
        monkeypatch.setattr(module, "linear", linear)
    found = prove(llm=decoder, tokens=8, limit=2)
    assert (found["code"], found["broken"]) == (1, True)


# --- an acceptor that takes one wrong token in a thousand -----------------------------------------


class Careless(Match):
    """Lets every thousandth drafted token pass that the target did not choose."""

    wrong = 0

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        verdict = super().accept(view, proposal, scores)
        graph, node = proposal.graph, verdict.keep[-1]
        refused = graph.children(node)
        if not refused:
            return verdict
        Careless.wrong += 1
        if Careless.wrong % 1000:
            return verdict
        child, end = refused[0], max(verdict.settled)
        settled = {**verdict.settled, end: TokenId(int(graph.tokens[child]))}
        settled[Position(int(end) + 1)] = scores.token(child)
        return replace(verdict, settled=settled, keep=(*verdict.keep, child))


def test_an_acceptor_that_takes_one_wrong_token_in_a_thousand(
    prove: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, acceptor = LLM.method, Careless()

    def method(self: LLM, spec: str | Method | None = None) -> Method:
        found = usual(self, spec)
        return replace(found, acceptor=acceptor) if found.name == "ngram" else found

    monkeypatch.setattr(LLM, "method", method)
    monkeypatch.setattr(Careless, "wrong", 0)
    found = prove(tokens=120, limit=8)
    assert Careless.wrong < 3000, "that would be more than a few in thousands"
    assert (found["code"], found["broken"]) == (1, True)
    assert found["equal_prompts"] >= 5, "most answers are equal: the fault is rare"


# --- noise that belongs to passes -----------------------------------------------------------------


def test_noise_that_is_keyed_by_the_pass(prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, count = logits_processors.attach, iter(range(10**9))

    def attach(sequence: Running, proposal: Proposal, ends: Collection[int]) -> Proposal:
        proposal = usual(sequence, proposal, ends)
        proposal.sampling = replace(proposal.sampling, index=next(count))
        return proposal

    monkeypatch.setattr("outstride.engine.model_runner.attach", attach)
    found = prove(*SAMPLED)
    assert (found["code"], found["broken"]) == (1, True)
    greedy = prove()
    assert greedy["code"] == 0, "greedy text has no noise, so nothing is wrong with it"


# --- a cache that keeps a rejected node -----------------------------------------------------------


def test_a_cache_that_keeps_a_rejected_node(prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = PagePool.commit

    def commit(
        self: PagePool,
        table: BlockTable,
        positions: IntArray,
        keep: Sequence[int],
        *more: Any,
    ) -> Moves:
        nodes = list(keep)
        for i, node in enumerate(nodes):
            siblings = [
                other
                for other in range(node + 1, len(positions))
                if positions[other] == positions[node] and other not in nodes
            ]
            if siblings:  # the KV of a sibling stays in place of the accepted node
                nodes[i] = NodeId(siblings[0])
                break
        return usual(self, table, positions, nodes, *more)

    monkeypatch.setattr(PagePool, "commit", commit)
    found = prove(method="recycle")
    assert (found["code"], found["broken"]) == (1, True)
    assert "batch" in found["contexts"]
