"""`outstride run`: answers one prompt as a stream, and prints tokens, passes and speed."""

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
from outstride.core.structured_output import OutputFormat
from outstride.errors import InvalidGrammar, InvalidPrompt
from outstride.results import Chunk, Completion

if TYPE_CHECKING:
    from outstride.llm import LLM


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="answer one prompt",
        description="Answers one prompt, streaming. The last line has the number of tokens and "
        "forward passes, and the speed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the prompt; - reads it from standard input"
    )
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--method",
        default="auto",
        help="decoding method, as NAME or NAME:key=value,… (default auto, which drafts where it pays; "
        "`outstride methods` lists them)",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without the chat template"
    )
    structured = parser.add_mutually_exclusive_group()
    structured.add_argument(
        "--schema",
        metavar="JSON",
        help="structured output: the answer is JSON of this schema; the schema itself, or its file",
    )
    structured.add_argument(
        "--regex",
        metavar="TEXT",
        help="structured output: the answer matches this regular expression",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="show the pass and the drafter that each token came from",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    sampling.add(parser)
    parser.set_defaults(action=run, parser=parser)


def run(args: argparse.Namespace, context: Context) -> int:
    """Answers the prompt."""
    if args.raw and args.system is not None:
        args.parser.print_usage(sys.stderr)
        print("error: --system needs the chat template; it cannot go with --raw", file=sys.stderr)
        return 2
    params = sampling.params_of(args)
    check_method(args.method)
    args.output_format = _output_format(args)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt = _prompt(text, args.system, raw=args.raw)
    with loaded(args, context) as llm:
        with screen.waiting("loading what the method needs"):
            llm.prepare(args.method)
        if args.json:
            _print_json(llm, prompt, params, args)
        else:
            _stream(llm, prompt, params, args)
    return 0


def _prompt(text: str, system: str | None, *, raw: bool) -> str | list[dict[str, str]]:
    if raw:
        return text
    if not text.strip():  # the chat template would turn it into a prompt
        raise InvalidPrompt("the prompt is empty")
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _output_format(args: argparse.Namespace) -> OutputFormat | None:
    """The structured output that the options ask for."""
    if args.regex is not None:
        return OutputFormat.regex(args.regex)
    if args.schema is None:
        return None
    text = args.schema
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidGrammar(f"--schema {text}: {error.strerror}") from error
    return OutputFormat("json_schema", text)


def _print_json(
    llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams, args: argparse.Namespace
) -> None:
    [result] = llm.generate(
        prompt, params, method=args.method, shape=args.output_format, trace=args.trace
    )
    values = {
        "model": llm.name,
        "fingerprint": llm.fingerprint_of(params.adapter),
        **result.to_dict(),
    }
    print(json.dumps(values, ensure_ascii=False))


class _Answers:
    """Prints several answers one after the other, although their chunks arrive interleaved."""

    def __init__(self, count: int, writer: screen.Writer) -> None:
        self._count = count
        self._writer = writer
        self._current = 0
        self._waiting: dict[int, str] = {}
        self.done: dict[int, Completion] = {}
        self._print_header()

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
            self._print_header()
            self._writer.write(self._waiting.pop(self._current, ""))

    def _print_header(self) -> None:
        if self._count > 1 and self._current < self._count:
            self._writer.write(f"[{self._current + 1} of {self._count}]\n")


def _stream(
    llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams, args: argparse.Namespace
) -> None:
    writer = screen.Writer()
    answers = _Answers(params.n, writer)
    stream = llm.stream(
        prompt, params, method=args.method, shape=args.output_format, trace=args.trace
    )
    try:
        with closing(stream):  # type: ignore[type-var]
            for chunk in stream:
                answers.take(chunk)
    finally:
        writer.end_line()
    outputs = [answers.done[i] for i in sorted(answers.done)]
    _print_summary(llm, outputs, params, args)


def _print_summary(
    llm: LLM, outputs: Sequence[Completion], params: SamplingParams, args: argparse.Namespace
) -> None:
    """Prints trace, log-probabilities and remarks; the last line is always the statistics."""

    def decode(tokens: Sequence[int]) -> str:
        return llm.tokenizer.decode(tokens, skip_special=False)

    for output in outputs:
        if args.trace:
            trace.show(decode, output)
        if params.logprobs is not None:
            trace.show_logprobs(decode, output)
    if any(output.finish_reason == "length" for output in outputs):
        screen.note("cut off by the limit on tokens (--max-tokens)")
    if params.temperature > 0 and params.seed is None:
        screen.note(f"--seed {outputs[0].seed} gives this text again")
    print(screen.stats_line(outputs), flush=True)
