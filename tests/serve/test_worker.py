"""The engine process from the inside: one request's failure, estimates, the one message per pass."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outstride import LLM, SamplingParams, registry
from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.graph import IntArray
from outstride.core.proposal import TARGET
from outstride.core.sequence import Table, View
from outstride.core.shape import Shape
from outstride.engine.cost import Cost
from outstride.serve.wire import (
    CANCEL,
    NEWS,
    PING,
    PONG,
    QUIT,
    START,
    Gauges,
    Job,
    News,
    pack,
    receive,
)
from outstride.serve.worker import Worker, _touch
from tests.serve.running import MESSAGES

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


class Fails(Drafter):
    """Goes well for a while.

    Paper: none
    Exactness: exact
    Needs: nothing
    Cost per step: the request
    """

    def demand(self, view: View) -> Demand:
        return Demand(most=1, gain=1.0)

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        if view.end - view.prompt_length >= 7:
            raise RuntimeError("a drafter with a bug")
        return (yield from super().guess(view, room))


class Engine:
    """A worker on a thread, and the other end of its socket."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.ours, self.theirs = socket.socketpair()
        self.worker = Worker(self.theirs, llm)
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()
        self.messages = 0

    def send(self, *message: Any) -> None:
        self.ours.sendall(pack(message))

    def until_done(self, *jobs: int) -> dict[int, list[News]]:
        found: dict[int, list[News]] = {job: [] for job in jobs}
        while not all(news and news[-1].done for news in found.values()):
            message = receive(self.ours)
            assert message is not None
            assert message[0] == NEWS
            self.messages += 1
            for news in message[1]:
                found[news.job].append(news)
        return found

    def ask(self, what: int) -> Any:
        self.send(what, 99)
        while (message := receive(self.ours)) is not None:
            if message[0] == PONG:
                return message[2]
        raise AssertionError("the worker went away")


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    registry.discover()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    registry.method("fails", family="tests")(Fails)
    with LLM(str(model), pages=512) as llm:
        llm.engine.scheduler.cost = Cost({1: 0.010, 64: 0.0101}, frozen=True)
        found = Engine(llm)
        yield found
        found.send(QUIT)
        found.thread.join(20)
        assert not found.thread.is_alive()
        llm.engine.check_integrity()
        found.ours.close()
        found.theirs.close()


def job(number: int, method: str = "plain", **more: Any) -> Job:
    options: dict[str, Any] = {"params": PARAMS, **more}
    return Job(number, [5, 6, 7, number], method=method, **options)


def test_one_request_fails_alone(engine: Engine) -> None:
    for number, method in enumerate(("plain", "fails", "ngram", "no-such-method")):
        engine.send(START, job(number, method))
    found = engine.until_done(0, 1, 2, 3)
    fault = found[1][-1].fault
    assert fault
    assert fault.kind == "method"
    assert "a drafter with a bug" in fault.message
    wrong = found[3][-1].fault
    assert wrong
    assert wrong.kind == "request"
    for number in (0, 2):
        end = found[number][-1].end
        assert end
        assert len(end.tokens) == 30
        assert end.reason == "length"
    assert engine.ask(PING).intact


def test_a_grammar_that_cannot_be_compiled_ends_its_request(engine: Engine) -> None:
    engine.send(START, job(0, shape=Shape("regex", "(")))
    engine.send(START, job(1))
    found = engine.until_done(0, 1)
    assert found[0][-1].fault
    assert found[1][-1].fault is None


def test_one_message_per_pass_for_everybody(engine: Engine) -> None:
    for number in range(4):
        engine.send(START, job(number))
    found = engine.until_done(0, 1, 2, 3)
    passes = sum(len(news) for news in found.values())
    assert passes >= 4 * 30 - 4
    # Not four times as many; on a busy machine they do not all begin at the same pass.
    assert engine.messages <= engine.llm.engine.ledger.steps + 4


def test_who_does_not_watch_hears_of_the_end_alone(engine: Engine) -> None:
    engine.send(START, job(0, watched=False))
    [news] = engine.until_done(0)[0]
    assert news.end
    assert len(news.end.tokens) == 30


def test_cancelled_requests_are_heard_of_no_more(engine: Engine) -> None:
    engine.send(START, job(0, params=SamplingParams(max_tokens=100_000, ignore_eos=True)))
    assert receive(engine.ours)
    engine.send(CANCEL, 0)
    gauges: Gauges = engine.ask(PING)
    assert gauges.running == gauges.waiting == 0
    assert gauges.pages_free == gauges.pages


def test_time_saved_is_priced_by_plain_passes(engine: Engine) -> None:
    """Passes cost 10 ms whatever they hold: what is saved is passes."""
    engine.send(START, job(0))
    plain = engine.until_done(0)[0][-1].end
    assert plain
    assert plain.saved == pytest.approx(0.0, abs=0.02)
    engine.send(START, job(1, "ngram"))
    drafted = engine.until_done(1)[1][-1].end
    assert drafted
    fewer = drafted.counts["emitted"] - drafted.counts["passes"]
    assert drafted.saved == pytest.approx(0.010 * fewer, abs=0.03)


def test_a_cache_that_contradicts_itself_shows(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    pool, stray = engine.llm.engine.passes.pools[TARGET], Table()
    assert engine.ask(PING).intact
    pool.reserve(stray, 3)  # a page that belongs to nobody
    assert not engine.ask(PING).intact
    assert "integrity: page" in capfd.readouterr().err
    pool.close(stray)
    assert not engine.ask(PING).intact  # what was wrong once is not forgotten


def test_figures(engine: Engine) -> None:
    engine.send(START, job(0))
    engine.until_done(0)
    gauges: Gauges = engine.ask(PING)
    assert gauges.totals["emitted"] == 30
    assert 0 < gauges.cpu_steps <= gauges.cpu_all
    assert gauges.rss > 1 << 20


def test_trace_and_logprobs_come_with_their_tokens(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    engine.send(START, job(0, "ngram", params=params, trace=True))
    found = engine.until_done(0)[0]
    end = found[-1].end
    assert end
    trace = [row for news in found for row in news.trace or ()]
    rows = [row for news in found for row in news.rows or ()]
    assert [row[0] for row in trace] == end.tokens
    assert [row[0][0] for row in rows] == end.tokens
    [prompt] = [news.prompt for news in found if news.prompt is not None]
    assert prompt[0] is None
    assert [row[0][0] for row in prompt[1:]] == [6, 7, 0]


def test_the_memory_of_a_cache_is_there_before_it_is_needed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(model), pages=150) as llm:
        written: list[int] = []
        move = llm.model.move

        def noted(sources: IntArray, targets: IntArray) -> None:
            written.extend(targets.tolist())
            move(sources, targets)

        monkeypatch.setattr(llm.model, "move", noted)
        _touch(llm.model)
        assert sorted(written) == list(range(150 * llm.model.page_size))
        monkeypatch.undo()
        touched = llm.generate([5, 6, 7], params)[0].token_ids
        llm.engine.check_integrity()
    with LLM(str(model), pages=150) as llm:
        assert touched == llm.generate([5, 6, 7], params)[0].token_ids


def test_messages_are_what_the_worker_was_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack((START, MESSAGES)))
        assert receive(theirs) == (START, MESSAGES)
        ours.sendall(pack((START, MESSAGES))[:-1])
        ours.close()
        assert receive(theirs) is None
