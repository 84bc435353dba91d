"""The engine process from the inside: a request that fails, estimates, one message per pass."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outstride import LLM, SamplingParams, registry
from outstride.core.contracts import Demand, Drafter, DraftRounds
from outstride.core.graph import IntArray
from outstride.core.sequence import BlockTable, View
from outstride.core.structured_output import OutputFormat
from outstride.policy.cost_model import CostModel
from outstride.serve.ipc import (
    CANCEL,
    OUTPUTS,
    PING,
    PONG,
    SHUTDOWN,
    SUBMIT,
    EngineOutput,
    EngineRequest,
    Gauges,
    pack,
    receive,
)
from outstride.serve.worker import Worker, _allocate
from tests.serve.running import CAP, MESSAGES

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


class FailingDrafter(Drafter):
    """Raises after some tokens.

    Paper: none
    Exactness: exact
    Needs: nothing
    Cost per step: the request
    """

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=1, gain=1.0)

    def draft_tree(self, view: View, room: int) -> DraftRounds:
        yield from ()
        if view.end - view.prompt_length >= 7:
            raise RuntimeError("a drafter with a bug")
        return (yield from super().draft_tree(view, room))


class WorkerOnThread:
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

    def until_done(self, *ids: int) -> dict[int, list[EngineOutput]]:
        found: dict[int, list[EngineOutput]] = {number: [] for number in ids}
        while not all(outputs and outputs[-1].done for outputs in found.values()):
            message = receive(self.ours)
            assert message is not None
            assert message[0] == OUTPUTS
            self.messages += 1
            for output in message[1]:
                found[output.request_id].append(output)
        return found

    def ask(self, what: int) -> Any:
        self.send(what, 99)
        while (message := receive(self.ours)) is not None:
            if message[0] == PONG:
                return message[2]
        raise AssertionError("the worker has ended")


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerOnThread]:
    registry.discover()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    registry.method("fails", family="tests")(FailingDrafter)
    with LLM(str(model), pages=512) as llm:
        llm.engine.cost = CostModel({1: 0.010, 64: 0.0101}, frozen=True)
        found = WorkerOnThread(llm)
        yield found
        found.send(SHUTDOWN)
        found.thread.join(CAP)
        assert not found.thread.is_alive()
        llm.engine.check_integrity()
        found.ours.close()
        found.theirs.close()


def request(number: int, method: str = "plain", **more: Any) -> EngineRequest:
    options: dict[str, Any] = {"params": PARAMS, **more}
    return EngineRequest(number, [5, 6, 7, number], method=method, **options)


def test_one_request_fails_alone(engine: WorkerOnThread) -> None:
    for number, method in enumerate(("plain", "fails", "ngram", "no-such-method")):
        engine.send(SUBMIT, request(number, method))
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


def test_a_grammar_that_cannot_be_compiled_ends_its_request(engine: WorkerOnThread) -> None:
    engine.send(SUBMIT, request(0, output_format=OutputFormat("regex", "(")))
    engine.send(SUBMIT, request(1))
    found = engine.until_done(0, 1)
    assert found[0][-1].fault
    assert found[1][-1].fault is None


class SlowCompiler:
    """Compiles a regex only when it is released, and everything else at once."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._compile = llm.shaped
        self.started, self.release = threading.Event(), threading.Event()
        monkeypatch.setattr(llm, "shaped", self)

    def __call__(self, method: Any, output_format: Any, params: Any) -> Any:
        if output_format is not None and output_format.kind == "regex":
            self.started.set()
            assert self.release.wait(CAP)
        return self._compile(method, output_format, params)


SLOW = OutputFormat("regex", "[ab]{30}")


def test_a_slow_grammar_delays_no_other_request(
    engine: WorkerOnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SlowCompiler(engine.llm, monkeypatch)
    engine.send(SUBMIT, request(0, output_format=SLOW))
    assert compiler.started.wait(CAP)
    engine.ours.settimeout(CAP)
    engine.send(SUBMIT, request(1, params=SamplingParams(max_tokens=10_000, ignore_eos=True)))
    engine.send(SUBMIT, request(2))
    assert engine.ask(PING).running <= 2  # answered while the grammar is compiled
    engine.send(CANCEL, 1)
    outputs: list[EngineOutput] = []
    while not (outputs and outputs[-1].done):
        message = receive(engine.ours)
        assert message is not None
        outputs += [output for output in message[1] if output.request_id == 2]
    assert engine.ask(PING).running == 0
    compiler.release.set()
    [*_, last] = engine.until_done(0)[0]
    assert last.fault is None
    assert last.end
    assert len(last.end.tokens) == 30


def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_never_starts(
    engine: WorkerOnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SlowCompiler(engine.llm, monkeypatch)
    engine.send(SUBMIT, request(0, output_format=SLOW))
    assert compiler.started.wait(CAP)
    engine.send(CANCEL, 0)
    engine.ours.settimeout(CAP)
    assert engine.ask(PING).running == 0
    compiler.release.set()
    engine.send(SUBMIT, request(1, output_format=OutputFormat("ebnf", 'root ::= "ab"')))
    found = engine.until_done(1)  # compiled after the cancelled one; an output of that would raise
    assert found[1][-1].end


def test_a_worker_shuts_down_while_a_grammar_is_compiled(
    engine: WorkerOnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SlowCompiler(engine.llm, monkeypatch)
    engine.send(SUBMIT, request(0, output_format=SLOW))
    engine.send(SUBMIT, request(1, output_format=SLOW))
    assert compiler.started.wait(CAP)
    engine.send(SHUTDOWN)
    engine.thread.join(CAP)
    assert not engine.thread.is_alive()
    compiler.release.set()


def test_one_message_per_pass_for_all_requests(engine: WorkerOnThread) -> None:
    for number in range(4):
        engine.send(SUBMIT, request(number))
    found = engine.until_done(0, 1, 2, 3)
    passes = sum(len(outputs) for outputs in found.values())
    assert passes >= 4 * 30 - 4
    # Not four times as many; on a busy machine they do not all begin at the same pass.
    assert engine.messages <= engine.llm.engine.steps + 4


def test_a_request_that_does_not_stream_has_one_output(engine: WorkerOnThread) -> None:
    engine.send(SUBMIT, request(0, streaming=False))
    [output] = engine.until_done(0)[0]
    assert output.end
    assert len(output.end.tokens) == 30


def test_cancelled_requests_have_no_more_outputs(engine: WorkerOnThread) -> None:
    engine.send(SUBMIT, request(0, params=SamplingParams(max_tokens=100_000, ignore_eos=True)))
    assert receive(engine.ours)
    engine.send(CANCEL, 0)
    gauges: Gauges = engine.ask(PING)
    assert gauges.running == gauges.waiting == 0
    assert gauges.pages_free == gauges.pages


def test_time_saved_follows_the_cost_of_plain_passes(engine: WorkerOnThread) -> None:
    """Passes cost 10 ms whatever they hold: what is saved is passes."""
    engine.send(SUBMIT, request(0))
    plain = engine.until_done(0)[0][-1].end
    assert plain
    assert plain.saved == pytest.approx(0.0, abs=0.02)
    engine.send(SUBMIT, request(1, "ngram"))
    drafted = engine.until_done(1)[1][-1].end
    assert drafted
    fewer = drafted.counts["emitted"] - drafted.counts["passes"]
    assert drafted.saved == pytest.approx(0.010 * fewer, abs=0.03)


def test_a_cache_that_fails_its_integrity_check_is_reported(
    engine: WorkerOnThread, capfd: pytest.CaptureFixture[str]
) -> None:
    pool, stray = engine.llm.engine.pool(), BlockTable()
    assert engine.ask(PING).intact
    pool.reserve(stray, 3)  # a page without an owner
    assert not engine.ask(PING).intact
    assert "integrity: page" in capfd.readouterr().err
    pool.close(stray)
    assert not engine.ask(PING).intact  # one failure stays visible


def test_gauges(engine: WorkerOnThread) -> None:
    engine.send(SUBMIT, request(0))
    engine.until_done(0)
    gauges: Gauges = engine.ask(PING)
    assert gauges.totals["emitted"] == 30
    assert 0 < gauges.cpu_steps <= gauges.cpu_all
    assert gauges.rss > 1 << 20


def test_trace_and_logprobs_come_with_their_tokens(engine: WorkerOnThread) -> None:
    params = SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    engine.send(SUBMIT, request(0, "ngram", params=params, trace=True))
    found = engine.until_done(0)[0]
    end = found[-1].end
    assert end
    trace = [row for output in found for row in output.trace or ()]
    rows = [row for output in found for row in output.logprobs or ()]
    assert [row[0] for row in trace] == end.tokens
    assert [row[0][0] for row in rows] == end.tokens
    [prompt] = [output.prompt_logprobs for output in found if output.prompt_logprobs is not None]
    assert prompt[0] is None
    assert [row[0][0] for row in prompt[1:]] == [6, 7, 0]


def test_the_memory_of_a_cache_is_allocated_before_it_is_needed(
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
        _allocate(llm.model)
        assert sorted(written) == list(range(150 * llm.model.page_size))
        monkeypatch.undo()
        allocated = llm.generate([5, 6, 7], params)[0].token_ids
        llm.engine.check_integrity()
    with LLM(str(model), pages=150) as llm:
        assert allocated == llm.generate([5, 6, 7], params)[0].token_ids


def test_messages_arrive_as_they_were_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack((SUBMIT, MESSAGES)))
        assert receive(theirs) == (SUBMIT, MESSAGES)
        ours.sendall(pack((SUBMIT, MESSAGES))[:-1])
        ours.close()
        assert receive(theirs) is None
