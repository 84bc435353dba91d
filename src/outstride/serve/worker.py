"""The engine process: receives requests, steps the engine, and sends what each pass did.

Threads share the work. The main thread receives messages and never waits for anything else, so that
cancels and pings are served at once. Two threads compile grammars, short and long ones, and then submit
their requests; requests without a grammar do not wait for them. The engine's thread steps and
sends. No thread waits for a client: the HTTP process reads every message as it comes.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from outstride.core.contracts import Grammar, Method, Model
from outstride.core.sequence import Sequence
from outstride.engine.engine_thread import OutputEvent, RequestHandle
from outstride.errors import IntegrityError, InvalidGrammar, OutstrideError, RequestError
from outstride.llm import LLM
from outstride.serve.ipc import (
    CANCEL,
    OUTPUTS,
    PING,
    PONG,
    READY,
    SHUTDOWN,
    SUBMIT,
    EngineFault,
    EngineOutput,
    EngineRequest,
    EngineSettings,
    Gauges,
    Handshake,
    RequestEnd,
    pack,
    receive,
)
from outstride.serve.pass_trace import record_pass
from outstride.serve.savings import SavingsEstimator

MAX_METHODS = 64
"""Methods, with their options, that stay built: drafters remember earlier texts."""
LONG_FORMAT = 2048
"""Characters of a schema or grammar: longer ones are compiled on a thread of their own."""
SEND_BUFFER = 4 << 20
SLOTS_AT_ONCE = 1024
"""Slots of the KV cache that are written at once while its memory is allocated."""


class ActiveRequest:
    """A request that is compiled or runs."""

    def __init__(self, request: EngineRequest, mark: tuple[int, float, float]) -> None:
        self.request = request
        self.mark = mark
        self.handle: RequestHandle | None = None
        """None until it is submitted to the engine."""
        self.num_sent: dict[int, int] = {}
        """Tokens whose log-probabilities and trace have been sent, by sample."""
        self.prompt_sent = False


class Worker:
    """One engine and the socket to its HTTP process."""

    def __init__(self, connection: socket.socket, llm: LLM) -> None:
        self._connection = connection
        self._llm = llm
        self._savings = SavingsEstimator(llm)
        self._thread = llm.engine_thread
        self._thread.after_each = self._flush
        # Short formats do not wait for long ones. The compiler itself runs without the GIL.
        self._compilers = {
            long: ThreadPoolExecutor(1, thread_name_prefix="grammar") for long in (False, True)
        }
        self._methods: OrderedDict[str, Method] = OrderedDict()
        self._active: dict[int, ActiveRequest] = {}
        self._submitting = threading.Lock()
        """Held while a request goes to the engine, so that a cancel comes before or after it."""
        self._outputs: list[EngineOutput] = []
        self._steps = 0
        self._send_cpu = 0.0
        self._intact = True

    # --- the main thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until the other end closes the connection."""
        while (message := receive(self._connection)) is not None:
            kind, *rest = message
            if kind == SUBMIT:
                self._start(*rest)
            elif kind == CANCEL:
                self._cancel(*rest)
            elif kind == PING:
                self._thread.post(lambda number=rest[0]: self._pong(number, self._gauges()))  # type: ignore[misc]
            elif kind == SHUTDOWN:
                break
        with self._submitting:
            self._active.clear()
        for compiler in self._compilers.values():
            compiler.shutdown(wait=False, cancel_futures=True)
        self._thread.close()

    def _start(self, request: EngineRequest) -> None:
        active = ActiveRequest(request, self._savings.mark())
        self._active[request.id] = active
        try:
            method = self._method(request.method)
        except Exception as error:
            self._refuse(active, error)
            return
        if request.output_format is None:
            self._submit(active, method, None)
        else:
            long = len(request.output_format.text) > LONG_FORMAT
            self._compilers[long].submit(self._compile, active, method)

    def _compile(self, active: ActiveRequest, method: Method) -> None:
        """On the grammar thread: everything about a grammar that may take long or fail."""
        request = active.request
        if request.id not in self._active:
            return  # cancelled meanwhile
        try:
            method, grammar = self._llm.shaped(method, request.output_format, request.params)
        except Exception as error:
            self._refuse(active, error)
            return
        self._submit(active, method, grammar)

    def _submit(self, active: ActiveRequest, method: Method, grammar: Grammar | None) -> None:
        request = active.request
        handle = RequestHandle(
            request.tokens,
            request.params,
            method,
            lambda event: self._on_event(active, event),
            salt=request.salt,
            streaming=request.streaming,
            stream_canvas=request.graphs,
            grammar=grammar,
            token_to_bytes=self._llm.detokenizer(request.params),
            priority=request.priority,
        )
        with self._submitting:
            if request.id in self._active:
                active.handle = handle
                self._thread.submit(handle)

    def _refuse(self, active: ActiveRequest, error: Exception) -> None:
        """Ends a request that could not start."""
        number, fault = active.request.id, _fault(error)
        if isinstance(error, OutstrideError):  # it asks for what this engine does not have
            kind = "grammar" if isinstance(error, InvalidGrammar) else "request"
            fault = EngineFault(kind, fault.message)
        with self._submitting:
            if self._active.pop(number, None) is not None:
                output = EngineOutput(number, fault=fault, done=True)
                self._thread.post(lambda: self._outputs.append(output))

    def _method(self, spec: str) -> Method:
        found = self._methods.pop(spec, None)
        if found is None:
            found = self._llm.build(spec)
        self._methods[spec] = found
        while len(self._methods) > MAX_METHODS:
            self._methods.popitem(last=False)
        return found

    def _cancel(self, number: int) -> None:
        with self._submitting:
            active = self._active.pop(number, None)
        if active is not None and active.handle is not None:
            self._thread.cancel(active.handle)

    # --- the engine's thread ------------------------------------------------------------------------

    def _on_event(self, active: ActiveRequest, event: OutputEvent) -> None:
        """Turns an event of the engine into an output of this pass's message."""
        request = active.request
        if event.progress is None:
            self._active.pop(request.id, None)
            fault = _fault(event.error) if event.error else None
            self._outputs.append(EngineOutput(request.id, fault=fault, done=event.done))
            return
        progress = event.progress
        sequence, logprobs, trace, fault = progress.sequence, None, None, None
        if event.done:
            self._active.pop(request.id, None)
        elif request.id not in self._active:
            return  # cancelled: the HTTP process would drop it
        num_tokens, tokens = len(sequence.tokens) - sequence.prompt_length, None
        if request.params.logprobs is not None or request.trace or request.return_token_ids:
            first = active.num_sent.get(sequence.index, 0)
            active.num_sent[sequence.index] = num_tokens
            if request.return_token_ids:
                tokens = sequence.output[first:num_tokens]
            if request.trace:
                trace = [(*row,) for row in sequence.trace[first:num_tokens]]
            if request.params.logprobs is not None:
                places = range(first + sequence.prompt_length, len(sequence.tokens))
                logprobs = [sequence.logprobs.get(at) for at in places]
        end = prompt_logprobs = None
        if progress.finished:
            end = self._end(active, sequence)
            if sequence.error is not None:
                fault = _fault(sequence.error)
            if request.params.prompt_logprobs is not None and not active.prompt_sent:
                active.prompt_sent = True
                known = sequence.prompt_logprobs
                prompt_logprobs = [known.get(at) for at in range(sequence.prompt_length)]
        self._outputs.append(
            EngineOutput(
                request.id,
                sequence.index,
                progress.text,
                logprobs,
                trace,
                end,
                prompt_logprobs,
                fault,
                event.done,
                record_pass(progress) if request.graphs else None,
                num_tokens,
                tokens,
            )
        )

    def _end(self, active: ActiveRequest, sequence: Sequence) -> RequestEnd:
        counts = sequence.counts
        return RequestEnd(
            sequence.finish_reason or "error",
            asdict(counts),
            sequence.seed,
            sequence.method.spec or sequence.method.name,
            self._savings.saved(active.mark, counts),
            sequence.output,
            None if sequence.pooled is None else sequence.pooled.vector(),
        )

    def _flush(self) -> None:
        """After each pass and each call from another thread: one message with all new outputs."""
        started = time.thread_time()
        steps = self._llm.engine.steps
        if steps != self._steps:
            self._steps = steps
            self._savings.add_pass()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._send((OUTPUTS, outputs))
        self._send_cpu += time.thread_time() - started

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.sendall(pack(message))
        except OSError:
            os._exit(0)  # the HTTP process has gone

    def send_handshake(self, fingerprint: str, tokenizer: bytes) -> None:
        """The first message: the model is loaded."""
        model = self._llm.model
        capacity = self._llm.engine.pool().capacity
        handshake = Handshake(
            model=self._llm.name,
            fingerprint=fingerprint,
            operations=model.ops.name,
            context=model.context,
            capacity=capacity,
            vocab_size=model.vocab_size,
            tokenizer=tokenizer,
            device=self._llm.device,
            weights=self._llm.weights,
            kv_bytes=capacity * model.ops.kv_bytes_per_token(model.config),
            adapters={name: self._llm.fingerprint_of(name) for name in model.adapters},
        )
        self._send((READY, handshake))

    def _pong(self, number: int, value: Any) -> None:
        self._send((PONG, number, value))

    def _check(self) -> bool:
        """Whether all integrity checks of the KV cache passed; checks again if the engine is idle."""
        if not self._llm.engine.busy:
            try:
                self._llm.engine.check_integrity()
            except IntegrityError as error:
                self._intact = False
                print(f"integrity: {error}", file=sys.stderr, flush=True)
        return self._intact

    def _gauges(self) -> Gauges:
        gauges = self._llm.engine.gauges()
        return Gauges(
            steps=gauges.steps,
            totals=asdict(gauges.totals),
            seconds=dict(gauges.seconds),
            running=gauges.running,
            waiting=gauges.waiting,
            pages=gauges.pages,
            pages_free=gauges.free_pages,
            cpu_steps=self._thread.cpu_seconds - self._send_cpu,
            cpu_all=time.process_time(),
            rss=_memory(),
            intact=self._check(),
        )


def _memory() -> int:
    """Resident memory of this process in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _fault(error: BaseException) -> EngineFault:
    kind = "request" if isinstance(error, RequestError) else "method"
    if not isinstance(error, OutstrideError):
        kind = "engine"
    return EngineFault(kind, str(error) or type(error).__name__)


def _allocate(model: Model) -> None:
    """Writes every slot of an empty KV cache once, so that the system allocates its memory now.

    Otherwise it allocates during passes, for all requests that reach a new page in the same pass: with
    eight decoding requests, such a pass took half as long again.
    """
    slots = model.pages * model.page_size
    for first in range(0, slots, SLOTS_AT_ONCE):
        targets = np.arange(first, min(first + SLOTS_AT_ONCE, slots))
        model.move(np.zeros_like(targets), targets)


def main() -> None:
    """Runs in the new process: the command line has the number of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the parent decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    message = receive(connection)
    if message is None:
        return
    settings: EngineSettings = message[0]
    llm = LLM(
        settings.model,
        device=settings.device,
        weights=settings.weights,
        adapter=settings.adapter,
        adapters=settings.adapters,
        pages=settings.pages,
        max_nodes=settings.max_nodes,
        max_sequences=settings.max_sequences,
    )
    tokenizer = pickle.dumps(llm.tokenizer)
    llm.method("auto")  # its draft head is attached before the first request
    for name in settings.draft_models:
        llm.method(f"draft:model={name}")
    for model in llm.engine.models.values():
        _allocate(model)
    llm.engine.warm_up()
    worker = Worker(connection, llm)
    gc.collect()
    gc.freeze()  # what is loaded stays: scanning it in every collection would delay passes
    worker.send_handshake(llm.fingerprint, tokenizer)
    worker.run()


if __name__ == "__main__":
    main()
