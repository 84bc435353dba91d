"""`outstride run`: one prompt, its answer as a stream, and what it cost."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import sampling, screen, trace
from outstride.cli.context import (
    Context,
    add_adapter_option,
    add_model_options,
    check_method,
    loaded,
)
from outstride.core.params import SamplingParams
from outstride.core.shape import Shape
from outstride.errors import InvalidGrammar, InvalidPrompt
from outstride.results import Chunk, Completion

if TYPE_CHECKING:
    from outstride.llm import LLM


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="answer one prompt",
        description="Answers one prompt, streaming. The last line says what the answer cost.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the prompt; - reads it from standard input"
    )
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--method",
        help="name or name:key=value,… (default plain, or steps for a masked model; see `outstride "
        "methods`)",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt; no chat template")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--schema",
        metavar="JSON",
        help="the answer is JSON that fits this schema: its text, or the name of its file",
    )
    shape.add_argument("--regex", metavar="TEXT", help="the answer matches this expression")
    parser.add_argument("--trace", action="store_true", help="show which pass each token came from")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    sampling.add(parser)
    parser.set_defaults(action=run, parser=parser)


def run(args: argparse.Namespace, context: Context) -> int:
    """Answers."""
    if args.raw and args.system is not None:
        args.parser.print_usage(sys.stderr)
        print("error: --system needs the chat template; it cannot go with --raw", file=sys.stderr)
        return 2
    params = sampling.params_of(args)
    check_method(args.method)
    args.shape = _shape(args)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt = _prompt(text, args.system, raw=args.raw)
    with loaded(args, context) as llm:
        with screen.waiting("measuring what passes cost"):
            llm.prepare(args.method)
        if args.json:
            _print_json(llm, prompt, params, args)
        else:
            _stream(llm, prompt, params, args)
    return 0


def _prompt(text: str, system: str | None, *, raw: bool) -> str | list[dict[str, str]]:
    if raw:
        return text
    if not text.strip():  # the template would make a prompt of it
        raise InvalidPrompt("the prompt is empty")
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _shape(args: argparse.Namespace) -> Shape | None:
    """What the answer is to look like."""
    if args.regex is not None:
        return Shape.regex(args.regex)
    if args.schema is None:
        return None
    text = args.schema
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidGrammar(f"--schema {text}: {error.strerror}") from error
    return Shape("json_schema", text)


def _print_json(
    llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams, args: argparse.Namespace
) -> None:
    [result] = llm.generate(prompt, params, method=args.method, shape=args.shape, trace=args.trace)
    values = {"model": llm.name, "fingerprint": llm.fingerprint, **result.to_dict()}
    print(json.dumps(values, ensure_ascii=False))


class _Answers:
    """Shows several answers one after the other, although they arrive at the same time."""

    def __init__(self, count: int, writer: screen.Writer) -> None:
        self._count = count
        self._writer = writer
        self._current = 0
        self._waiting: dict[int, str] = {}
        self.done: dict[int, Completion] = {}
        self._head()

    def take(self, chunk: Chunk) -> None:
        if chunk.completion is not None:
            self.done[chunk.index] = chunk.completion
        if chunk.index != self._current:
            self._waiting[chunk.index] = self._waiting.get(chunk.index, "") + chunk.text
            return
        self._writer.write(chunk.text)
        while self._current in self.done and self._current < self._count:
            self._writer.end_line()
            self._current += 1
            self._head()
            self._writer.write(self._waiting.pop(self._current, ""))

    def _head(self) -> None:
        if self._count > 1 and self._current < self._count:
            self._writer.write(f"[{self._current + 1} of {self._count}]\n")


def _stream(
    llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams, args: argparse.Namespace
) -> None:
    writer = screen.Writer()
    answers = _Answers(params.n, writer)
    stream = llm.stream(prompt, params, method=args.method, shape=args.shape, trace=args.trace)
    try:
        with closing(stream):  # type: ignore[type-var]
            for chunk in stream:
                answers.take(chunk)
    finally:
        writer.end_line()
    outputs = [answers.done[i] for i in sorted(answers.done)]
    _afterwards(llm, outputs, params, args)


def _afterwards(
    llm: LLM, outputs: Sequence[Completion], params: SamplingParams, args: argparse.Namespace
) -> None:
    """What is said about the answer; the last line is always its cost."""

    def spell(tokens: Sequence[int]) -> str:
        return llm.tokenizer.decode(tokens, skip_special=False)

    for output in outputs:
        if args.trace:
            trace.show(spell, output)
        if params.logprobs is not None:
            trace.show_logprobs(spell, output)
    if any(output.finish_reason == "length" for output in outputs):
        screen.note("cut off by the limit on tokens (--max-tokens)")
    if params.temperature > 0 and params.seed is None:
        screen.note(f"--seed {outputs[0].seed} gives this text again")
    print(screen.stats_line(outputs), flush=True)
