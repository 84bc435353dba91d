"""`outstride chat`: a conversation. Ctrl-C stops an answer, not the program."""

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

_USELESS = ("n", "logprobs", "prompt_logprobs")
"""Parameters for which a conversation has no place."""

HELP = """\
/help              this list
/reset             forget the conversation
/method [NAME]     show or change the method: name or name:key=value,…
/set [KEY=VALUE]   show or change a sampling parameter, e.g. /set temperature=0.7
/stats             what the conversation has cost so far
/save FILE         write the conversation to a file, as JSON
/quit              leave (so do Ctrl-D and Ctrl-C)
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer."""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "chat",
        help="talk",
        description="A conversation. Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    add_adapter_option(parser)
    parser.add_argument(
        "--method", help="name or name:key=value,… (default plain, or steps for a masked model)"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    sampling.add(parser, without=_USELESS)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Talks until the user leaves."""
    params = sampling.params_of(args)
    check_method(args.method)
    with loaded(args, context) as llm:
        method = args.method or llm.default_method
        chat = Chat(llm, method=method, params=params, system=args.system)
        llm.prepare(method)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            screen.note(f"{llm.name}, {method}. /help lists commands, Ctrl-D leaves.")
        chat.loop()
    return 0


class Chat:
    """One conversation and what the user has set for it."""

    def __init__(
        self, llm: LLM, *, method: str = "plain", params: SamplingParams, system: str | None = None
    ) -> None:
        self.llm = llm
        self.method = method
        self.params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)

    # --- reading ----------------------------------------------------------------------------------

    def loop(self) -> None:
        """Line by line until the end."""
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
        """One entry; a backslash at the end of a line joins it with the next."""
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
        """Does what a line asks for; False to leave. No error ends the conversation."""
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
            screen.complain(error)
        return True

    # --- answering --------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        """Streams an answer. What was said before Ctrl-C stays in the conversation."""
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
        self._remark(completion)

    def _remark(self, completion: Completion | None) -> None:
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
        print("the conversation starts anew")

    def _method(self, rest: str) -> None:
        if rest:
            self.llm.method(rest)  # refuses what does not exist, loads what it needs
            self.method = rest
        print(f"method {self.method}")

    def _set(self, rest: str) -> None:
        if rest:
            key, equals, text = rest.partition("=")
            key = key.strip().replace("-", "_")
            if not equals:
                raise InvalidParams("write /set key=value")
            if key in _USELESS:
                raise InvalidParams(f"{key} has no use in a conversation")
            values = {**asdict(self.params), key: _value(text.strip())}
            self.params = SamplingParams.from_dict(values)
        default = asdict(SamplingParams())
        changed = {k: v for k, v in asdict(self.params).items() if v != default[k]}
        print(", ".join(f"{k}={v}" for k, v in changed.items()) or "everything is at its default")

    def _stats(self, _rest: str) -> None:
        ledger = self.llm.engine.ledger
        total, seconds = ledger.total, sum(ledger.seconds.values())
        per_pass = total.emitted / total.passes if total.passes else 0.0
        drafts = f"{total.accepted} of {total.proposed} drafted tokens accepted"
        print(
            f"{total.emitted} tokens, {total.passes} passes, {per_pass:.2f} tokens per pass, "
            f"{total.prompt_passes} passes that only read, {total.other_passes} of other models"
        )
        print(f"{drafts}; {seconds:.2f} s in the engine", end="")
        spent = {verb: s for verb, s in ledger.seconds.items() if s >= 0.005}
        print(f" ({', '.join(f'{verb} {s:.2f}' for verb, s in spent.items())})" if spent else "")

    def _save(self, rest: str) -> None:
        if not rest:
            raise InvalidParams("write /save FILE")
        values = {
            "model": self.llm.name,
            "fingerprint": self.llm.fingerprint,
            "method": self.method,
            "params": asdict(self.params),
            "messages": self.messages,
        }
        path = Path(rest).expanduser()
        path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        print(f"saved to {path}")


def _value(text: str) -> Any:
    """A value as written: JSON where it is JSON, none and true in anybody's spelling, else text."""
    plain = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in plain:
        return plain[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
