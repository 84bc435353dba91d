"""`outstride chat`: an interactive conversation. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.cli import sampling, screen
from outstride.cli.context import (
    Context,
    add_adapter_option,
    add_model_options,
    check_method,
    loaded,
)
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, InvalidPrompt
from outstride.results import Completion

if TYPE_CHECKING:
    from outstride.llm import LLM

_NOT_IN_CHAT = ("n", "logprobs", "prompt_logprobs")
"""Sampling parameters that a conversation does not have."""

HELP = """\
/help              this list
/reset             forget the conversation
/method [NAME]     show or change the decoding method: NAME or NAME:key=value,…
/set [KEY=VALUE]   show or change a sampling parameter, e.g. /set temperature=0.7
/stats             tokens, passes and time of the conversation
/save FILE         write the conversation to a file, as JSON
/quit              leave (so do Ctrl-D and Ctrl-C)
A line that ends in \\ continues in the next one. Ctrl-C stops an answer."""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "chat",
        help="chat with the model",
        description="An interactive conversation. Ctrl-C stops an answer, Ctrl-D leaves, /help "
        "lists the commands.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--method",
        default="auto",
        help="decoding method, as NAME or NAME:key=value,… (default auto, which drafts where it pays; "
        "`outstride methods` lists them)",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    sampling.add(parser, without=_NOT_IN_CHAT)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Runs the conversation until the user leaves."""
    params = sampling.params_of(args)
    check_method(args.method)
    with loaded(args, context) as llm:
        method = args.method
        chat = Chat(llm, method=method, params=params, system=args.system)
        with screen.waiting("loading what the method needs"):
            llm.prepare(method)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            screen.note(f"{llm.name}, {method}. /help lists commands, Ctrl-D leaves.")
        chat.loop()
    return 0


class Chat:
    """One conversation with its method and sampling parameters."""

    def __init__(
        self, llm: LLM, *, method: str = "auto", params: SamplingParams, system: str | None = None
    ) -> None:
        self.llm = llm
        self.method = method
        self.params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)

    # --- input ------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Handles line by line until the end of the input."""
        while True:
            try:
                line = self._read()
            except (EOFError, KeyboardInterrupt):
                if sys.stdin.isatty():
                    print()
                return
            if not self.handle(line):
                return

    def _read(self) -> str:
        """One input; a backslash at the end of a line joins it with the next."""
        lines: list[str] = []
        while True:
            line = self._line("... " if lines else "> ")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    @staticmethod
    def _line(prompt: str) -> str:
        if sys.stdin.isatty():
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def handle(self, line: str) -> bool:
        """Runs a command or answers a message; False to leave. Errors do not end the conversation."""
        line = line.strip()
        if not line:
            return True
        if line == "/quit":
            return False
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._answer(line)
        except BrokenPipeError:
            raise
        except Exception as error:
            if screen.debugging():
                raise
            screen.report_error(error)
        return True

    # --- answering --------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        """Streams an answer. Text from before Ctrl-C stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        writer, said, completion = screen.Writer(), "", None
        try:
            stream = self.llm.stream(self.messages, self.params, method=self.method)
            with closing(stream):  # type: ignore[type-var]
                for chunk in stream:
                    said += chunk.text
                    writer.write(chunk.text)
                    completion = chunk.completion or completion
        except KeyboardInterrupt:
            pass
        except InvalidPrompt as error:
            raise InvalidPrompt(f"{error}; /reset starts a new conversation") from error
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                self.messages.pop()
            writer.end_line()
        self._print_stats(completion)

    def _print_stats(self, completion: Completion | None) -> None:
        if completion is None:
            text = "stopped"
        else:
            text = screen.stats_line([completion])
            if completion.finish_reason == "length":
                text += f" (cut; /set max_tokens={2 * self.params.max_tokens})"
        screen.console().print(text, style="dim", markup=False, soft_wrap=True)
        if sys.stdin.isatty():
            print()

    # --- commands ---------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "reset": self._reset,
            "method": self._method,
            "set": self._set,
            "stats": self._stats,
            "save": self._save,
        }
        if name not in commands:
            raise InvalidParams(f"there is no command /{name}; /help lists them")
        commands[name](rest.strip())

    def _help(self, _rest: str) -> None:
        print(HELP)

    def _reset(self, _rest: str) -> None:
        self.messages = list(self._opening)
        print("a new conversation")

    def _method(self, rest: str) -> None:
        if rest:
            self.llm.method(rest)  # an unknown method is an error; what it needs is loaded
            self.method = rest
        print(f"method {self.method}")

    def _set(self, rest: str) -> None:
        if rest:
            key, equals, text = rest.partition("=")
            key = key.strip().replace("-", "_")
            if not equals:
                raise InvalidParams("write /set key=value")
            if key in _NOT_IN_CHAT:
                raise InvalidParams(f"{key} is not available in a conversation")
            values = {**asdict(self.params), key: _value(text.strip())}
            self.params = SamplingParams.from_dict(values)
        default = asdict(SamplingParams())
        changed = {k: v for k, v in asdict(self.params).items() if v != default[k]}
        print(
            ", ".join(f"{k}={v}" for k, v in changed.items())
            or "all parameters have their defaults"
        )

    def _stats(self, _rest: str) -> None:
        gauges = self.llm.engine.gauges()
        total, seconds = gauges.totals, sum(gauges.seconds.values())
        per_pass = total.emitted / total.passes if total.passes else 0.0
        rate = total.accepted / total.proposed if total.proposed else 0.0
        drafts = f"{total.accepted} of {total.proposed} draft tokens accepted"
        print(
            f"{total.emitted} tokens, {total.passes} passes, {per_pass:.2f} tokens per pass, "
            f"{total.prompt_passes} prefill passes, {total.other_passes} of draft models"
        )
        print(f"{drafts}, acceptance rate {rate:.0%}; {seconds:.2f} s in the engine", end="")
        spent = {verb: s for verb, s in gauges.seconds.items() if s >= 0.005}
        print(f" ({', '.join(f'{verb} {s:.2f}' for verb, s in spent.items())})" if spent else "")

    def _save(self, rest: str) -> None:
        if not rest:
            raise InvalidParams("write /save FILE")
        values = {
            "model": self.llm.name,
            "fingerprint": self.llm.fingerprint_of(self.params.adapter),
            "method": self.method,
            "params": asdict(self.params),
            "messages": self.messages,
        }
        path = Path(rest).expanduser()
        path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        print(f"saved to {path}")


def _value(text: str) -> Any:
    """The value of a text: JSON, or none, true and false in any case, or the text itself."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
