"""From the engine's outputs to OpenAI's response objects: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outstride.models.tokenizer import Tokenizer
from outstride.serve import pass_trace
from outstride.serve.ipc import EngineOutput, RequestEnd
from outstride.serve.parsing.answer import AnswerParser
from outstride.serve.parsing.tool_format import CALL, CONTENT, REASONING, Part
from outstride.serve.requests import ParsedRequest

REASONS = {"stop": "stop", "length": "length"}


def dumps(value: Any) -> str:
    """Compact JSON; encode it with errors="replace", because it may hold lone surrogates."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class ChoiceBuilder:
    """One answer while it is generated."""

    index: int
    text: str = ""
    num_tokens: int = 0
    logprobs: list[Any] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    end: RequestEnd | None = None
    token_ids: list[int] = field(default_factory=list)
    """Where the request wants them."""
    parser: AnswerParser | None = None
    """Splits the text into reasoning, content and calls; without one, it is all content."""
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    fresh: list[Part] = field(default_factory=list)
    """The parts that the last output added."""
    opened: bool = False
    """Whether its first chunk has been made."""
    offset: int = 0
    """Characters of the text that log-probabilities have been given for."""


class ResponseBuilder:
    """The response to one request, whole or in chunks."""

    def __init__(
        self, parsed: ParsedRequest, tokenizer: Tokenizer, model: str, fingerprint: str
    ) -> None:
        kind = "chat.completion" if parsed.chat else "text_completion"
        prefix = "chatcmpl" if parsed.chat else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.parsed = parsed
        count = len(parsed.engine_requests) * parsed.samples
        self.choices = [ChoiceBuilder(i, parser=parsed.answer_parser()) for i in range(count)]
        self.prompts: dict[int, list[Any]] = {}
        self._tokenizer = tokenizer
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        chunk = {**self._head, "object": "chat.completion.chunk" if parsed.chat else kind}
        self._opening = dumps(chunk)[:-1] + ',"choices":[{"index":'
        self._chunk_head = chunk
        self._token_text: dict[int, str] = {}
        # Most chunks hold some text and nothing else: what all of them share is serialized once.
        self._text_only = not (
            parsed.trace
            or parsed.graphs
            or parsed.logprobs is not None
            or self.choices[0].parser
            or parsed.return_token_ids
            or parsed.continuous_usage
        )

    # --- outputs ------------------------------------------------------------------------------------

    def add(self, place: int, output: EngineOutput) -> ChoiceBuilder:
        """Adds an output of the engine request at `place` to its answer, and returns that."""
        choice = self.choices[place * self.parsed.samples + output.sample]
        if not self.parsed.prompt_only:
            choice.text += output.text
        choice.num_tokens = max(choice.num_tokens, output.num_tokens)
        if output.tokens and not self.parsed.prompt_only:
            choice.token_ids += output.tokens
        if output.logprobs:
            choice.logprobs += output.logprobs
        if output.trace:
            choice.trace += [self._provenance(row) for row in output.trace]
        if output.prompt_logprobs is not None:
            self.prompts[place] = output.prompt_logprobs
        if output.end is not None:
            choice.end = output.end
        if choice.parser is not None:
            self._split(choice, choice.parser.feed(output.text, output.end is not None))
        return choice

    @staticmethod
    def _split(choice: ChoiceBuilder, parts: list[Part]) -> None:
        """Adds new parts to an answer."""
        choice.fresh = parts
        for part in parts:
            if part.kind == CONTENT:
                choice.content += part.text
            elif part.kind == REASONING:
                choice.reasoning += part.text
            else:
                choice.calls.append(
                    {
                        "id": f"call_{secrets.token_hex(12)}",
                        "type": "function",
                        "function": {"name": part.name, "arguments": part.text},
                    }
                )

    def _provenance(self, row: tuple[int, int, str, str]) -> dict[str, Any]:
        token, step, source, kind = row
        return {
            "token": token,
            "text": self._shown(token),
            "pass": step,
            "source": source,
            "kind": kind,
        }

    # --- whole answers ------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream."""
        choices = [self._choice(choice) for choice in self.choices]
        value = {**self._head, "choices": choices, "usage": self.usage()}
        if self.parsed.return_token_ids and self.parsed.chat:
            value["prompt_token_ids"] = self.parsed.engine_requests[0].tokens
        return value

    def _choice(self, choice: ChoiceBuilder) -> dict[str, Any]:
        value: dict[str, Any] = {"index": choice.index}
        if self.parsed.chat:
            split = choice.parser is not None
            content = choice.content if split else choice.text
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.calls:
                message |= {"content": content or None, "tool_calls": choice.calls}
            value["message"] = message
        else:
            value["text"] = self._echo(choice) + choice.text
        value["logprobs"] = self._logprobs(choice, choice.logprobs, first=True)
        value["finish_reason"] = self._reason(choice)
        place = choice.index // self.parsed.samples
        if self.parsed.prompt_logprobs is not None:
            value["prompt_logprobs"] = self._about_prompt(place)
        if self.parsed.return_token_ids:
            value["token_ids"] = choice.token_ids
            if not self.parsed.chat:
                value["prompt_token_ids"] = self.parsed.engine_requests[place].tokens
        if self.parsed.trace:
            value["outstride"] = {"trace": choice.trace}
        return value

    def _reason(self, choice: ChoiceBuilder) -> str | None:
        if choice.end is None:
            return None
        if choice.calls and choice.end.reason == "stop":
            return "tool_calls"
        return REASONS.get(choice.end.reason, "stop")

    def _echo(self, choice: ChoiceBuilder) -> str:
        echo = self.parsed.echo
        return "" if echo is None else echo[choice.index // self.parsed.samples]

    # --- chunks -------------------------------------------------------------------------------------

    def chunks(self, choice: ChoiceBuilder, output: EngineOutput) -> Iterator[str]:
        """What one pass adds to a stream: one chunk, or none."""
        text = "" if self.parsed.prompt_only else output.text
        if self._text_only and self.parsed.chat and output.end is None and choice.opened:
            if text:
                delta = f'{choice.index},"delta":{{"content":{json.dumps(text)}}}'
                yield f'{self._opening}{delta},"finish_reason":null}}]}}'
            return
        value: dict[str, Any] = {"index": choice.index}
        fresh = self._fresh(choice, text)
        if self.parsed.chat:
            opening: dict[str, Any] = {} if choice.opened else {"role": "assistant", "content": ""}
            if "tool_calls" in fresh or "reasoning_content" in fresh:
                opening.pop("content", None)
            value["delta"] = opening | fresh
        else:
            value["text"] = text if choice.opened else self._echo(choice) + text
        value["logprobs"] = self._logprobs(choice, output.logprobs or [], first=not choice.opened)
        value["finish_reason"] = self._reason(choice)
        if self.parsed.trace or self.parsed.graphs:
            value["outstride"] = self._own(output)
        if self.parsed.return_token_ids:
            value["token_ids"] = [] if self.parsed.prompt_only else output.tokens or []
        if output.end is not None and self.parsed.prompt_logprobs is not None:
            value["prompt_logprobs"] = self._about_prompt(choice.index // self.parsed.samples)
        about = output.logprobs or output.trace or output.pass_trace or output.tokens
        if not (fresh or output.end or about):
            return
        chunk = {**self._chunk_head, "choices": [value]}
        if self.parsed.return_token_ids and not choice.opened:
            place = self.parsed.engine_requests[choice.index // self.parsed.samples]
            chunk["prompt_token_ids"] = place.tokens
        choice.opened = True
        if self.parsed.continuous_usage:
            chunk["usage"] = self._tokens_so_far()
        yield dumps(chunk)

    def _tokens_so_far(self) -> dict[str, int]:
        """The usage that chunks have while answers grow: tokens of all answers of the request."""
        prompt = sum(len(request.tokens) for request in self.parsed.engine_requests)
        done = 0 if self.parsed.prompt_only else sum(c.num_tokens for c in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": done,
            "total_tokens": prompt + done,
        }

    def _own(self, output: EngineOutput) -> dict[str, Any]:
        """Which drafter the tokens came from, and what the pass proposed."""
        value: dict[str, Any] = {}
        if self.parsed.trace:
            value["trace"] = [self._provenance(row) for row in output.trace or ()]
        if self.parsed.graphs and output.pass_trace is not None:
            value["pass"] = pass_trace.to_json(
                output.pass_trace, self._shown, self._tokenizer.vocab_size
            )
        return value

    @staticmethod
    def _fresh(choice: ChoiceBuilder, text: str) -> dict[str, Any]:
        """What a chunk adds to an answer, as the fields of its delta."""
        if choice.parser is None:
            return {"content": text} if text else {}
        found: dict[str, Any] = {}
        for field_name, kind in (("content", CONTENT), ("reasoning_content", REASONING)):
            if joined := "".join(part.text for part in choice.fresh if part.kind == kind):
                found[field_name] = joined
        if count := sum(part.kind == CALL for part in choice.fresh):
            first = len(choice.calls) - count
            found["tool_calls"] = [
                {"index": i, **call} for i, call in enumerate(choice.calls[first:], start=first)
            ]
        return found

    def usage_chunk(self) -> str:
        """The last chunk, with the usage."""
        return dumps({**self._chunk_head, "choices": [], "usage": self.usage()})

    # --- usage --------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens, passes, drafts and the time saved."""
        parsed = self.parsed
        ends = [choice.end for choice in self.choices if choice.end is not None]
        prompt = sum(len(request.tokens) for request in parsed.engine_requests)
        done = 0 if parsed.prompt_only else sum(len(end.tokens) for end in ends)
        total: Counter[str] = Counter()
        sources: Counter[str] = Counter()
        for end in ends:
            total.update({k: v for k, v in end.counts.items() if isinstance(v, int)})
            sources.update(end.counts["sources"])
        passes = total["passes"]
        saved = sum(end.saved for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": done,
            "total_tokens": prompt + done,
            "prompt_tokens_details": {"cached_tokens": total["reused"]},
            "outstride": {
                "method": parsed.engine_requests[0].method,
                "passes": passes,
                "prompt_passes": total["prompt_passes"],
                "other_passes": total["other_passes"],
                "proposed": total["proposed"],
                "accepted": total["accepted"],
                "emitted": total["emitted"],
                "tokens_per_pass": round(total["emitted"] / passes, 3) if passes else 0.0,
                "sources": dict(sources),
                "preempted": total["preempted"],
                "seed": ends[0].seed if ends else None,
                "time_saved": {
                    "seconds": round(saved, 4),
                    "estimate": True,
                    "against": "plain passes at the same load, by their measured cost",
                },
            },
        }

    # --- log-probabilities --------------------------------------------------------------------------

    def _shown(self, token: int) -> str:
        """A token as text; one that is not whole characters as its bytes."""
        found = self._token_text.get(token)
        if found is None:
            data = self._tokenizer.token_bytes(token)
            try:
                found = data.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._token_text[token] = found
        return found

    def _logprobs(self, choice: ChoiceBuilder, rows: Sequence[Any], *, first: bool) -> Any:
        if self.parsed.logprobs is None:
            return None
        if self.parsed.chat:
            if choice.end is not None and choice.end.reason == "stop" and rows and rows[-1]:
                visible = rows[-1][0][0] not in self._tokenizer.eos_ids
                rows = (
                    rows if visible else rows[:-1]
                )  # the end-of-text token is no part of the answer
            found = [self._chat_row(row) for row in rows if row is not None]
            return {"content": found, "refusal": None}
        rows = [] if self.parsed.prompt_only else list(rows)
        place = choice.index // self.parsed.samples
        if first and self.parsed.echo is not None:
            request = self.parsed.engine_requests[place]
            about = self.prompts.get(place) or [None] * len(request.tokens)
            known = [
                row if row is not None else ((token, None),)
                for row, token in zip(about, request.tokens, strict=True)
            ]
            rows = known + rows
        return self._completion_rows(choice, rows)

    def _chat_row(self, row: Any) -> dict[str, Any]:
        (token, value), *top = row
        return {
            **self._entry(token, value),
            "top_logprobs": [self._entry(t, v) for t, v in top[: self.parsed.logprobs or 0]],
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._shown(token), "logprob": value, "bytes": list(data)}

    def _completion_rows(self, choice: ChoiceBuilder, rows: Sequence[Any]) -> dict[str, Any]:
        value: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for row in rows:
            if row is None:
                continue
            (token, own), *top = row
            shown = self._shown(token)
            value["tokens"].append(shown)
            value["token_logprobs"].append(own)
            best = {self._shown(t): v for t, v in top[: self.parsed.logprobs or 0]}
            value["top_logprobs"].append(None if own is None else {**best, shown: own})
            value["text_offset"].append(choice.offset)
            choice.offset += len(shown)
        return value

    def _about_prompt(self, place: int) -> list[Any]:
        found: list[Any] = []
        for row in self.prompts.get(place) or ():
            if row is None:
                found.append(None)
                continue
            found.append({str(t): {"logprob": v, "decoded_token": self._shown(t)} for t, v in row})
        return found
