"""From the engine's news to OpenAI's response objects: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outstride.models.tokenizer import Tokenizer
from outstride.serve import drawing, tools
from outstride.serve.orders import Order
from outstride.serve.wire import End, News

REASONS = {"stop": "stop", "length": "length"}


def dumps(value: Any) -> str:
    """Compact JSON. Halves of characters cannot be sent, so they are shown as replaced."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    text: str = ""
    rows: list[Any] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    end: End | None = None
    held: str = ""
    """Text that may turn out to be a call of a tool."""
    speaks: bool = False
    """Whether it is certain that it is not."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    opened: bool = False
    offset: int = 0


class Answer:
    """Everything that is said about one request."""

    def __init__(self, order: Order, tokenizer: Tokenizer, model: str, fingerprint: str) -> None:
        kind = "chat.completion" if order.chat else "text_completion"
        prefix = "chatcmpl" if order.chat else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.order = order
        self.choices = [Choice(i) for i in range(len(order.jobs) * order.samples)]
        self.prompts: dict[int, list[Any]] = {}
        self._tokenizer = tokenizer
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        chunk = {**self._head, "object": "chat.completion.chunk" if order.chat else kind}
        self._opening = dumps(chunk)[:-1] + ',"choices":[{"index":'
        self._chunk_head = chunk
        self._spelled: dict[int, str] = {}
        # Most chunks hold a piece of text and nothing else: what is the same in all is written once.
        self._plain = not (order.trace or order.graphs or order.logprobs is not None or order.tools)

    # --- taking -------------------------------------------------------------------------------------

    def take(self, place: int, news: News) -> Choice:
        """Enters what a pass did for the job at a place."""
        choice = self.choices[place * self.order.samples + news.sample]
        if not self.order.silent:
            choice.text += news.text
        if news.rows:
            choice.rows += news.rows
        if news.trace:
            choice.trace += [self._provenance(row) for row in news.trace]
        if news.prompt is not None:
            self.prompts[place] = news.prompt
        if news.end is not None:
            choice.end = news.end
            if self.order.tools and (self.order.must_call or not choice.speaks):
                choice.calls = tools.calls_of(choice.text, self.order.tools)
        return choice

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
        return {**self._head, "choices": choices, "usage": self.usage()}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        value: dict[str, Any] = {"index": choice.index}
        if self.order.chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message |= {"content": None, "tool_calls": choice.calls}
            value["message"] = message
        else:
            value["text"] = self._echo(choice) + choice.text
        value["logprobs"] = self._logprobs(choice, choice.rows, first=True)
        value["finish_reason"] = self._reason(choice)
        place = choice.index // self.order.samples
        if self.order.prompt_logprobs is not None:
            value["prompt_logprobs"] = self._about_prompt(place)
        if self.order.trace:
            value["outstride"] = {"trace": choice.trace}
        return value

    def _reason(self, choice: Choice) -> str | None:
        if choice.end is None:
            return None
        if choice.calls and choice.end.reason == "stop":
            return "tool_calls"
        return REASONS.get(choice.end.reason, "stop")

    def _echo(self, choice: Choice) -> str:
        echo = self.order.echo
        return "" if echo is None else echo[choice.index // self.order.samples]

    # --- chunks -------------------------------------------------------------------------------------

    def chunks(self, choice: Choice, news: News) -> Iterator[str]:
        """What one pass adds to a stream: one chunk, or none."""
        text = "" if self.order.silent else news.text
        if self._plain and self.order.chat and news.end is None and choice.opened:
            if text:
                delta = f'{choice.index},"delta":{{"content":{json.dumps(text)}}}'
                yield f'{self._opening}{delta},"finish_reason":null}}]}}'
            return
        if self.order.tools:
            text = self._released(choice, text)
        value: dict[str, Any] = {"index": choice.index}
        if self.order.chat:
            fresh: dict[str, Any] = {} if choice.opened else {"role": "assistant"}
            if text or not (choice.opened or choice.calls):
                fresh["content"] = text
            if choice.calls:
                fresh["tool_calls"] = [{"index": i, **c} for i, c in enumerate(choice.calls)]
            value["delta"] = fresh
        else:
            value["text"] = text if choice.opened else self._echo(choice) + text
        value["logprobs"] = self._logprobs(choice, news.rows or [], first=not choice.opened)
        value["finish_reason"] = self._reason(choice)
        if self.order.trace or self.order.graphs:
            value["outstride"] = self._own(news)
        if news.end is not None and self.order.prompt_logprobs is not None:
            value["prompt_logprobs"] = self._about_prompt(choice.index // self.order.samples)
        silent = not (text or news.end or news.rows or news.trace or news.drawing)
        if silent:
            return
        choice.opened = True
        yield dumps({**self._chunk_head, "choices": [value]})

    def _own(self, news: News) -> dict[str, Any]:
        """Where a pass's tokens came from, and what it looked like."""
        value: dict[str, Any] = {}
        if self.order.trace:
            value["trace"] = [self._provenance(row) for row in news.trace or ()]
        if self.order.graphs and news.drawing is not None:
            value["pass"] = drawing.told(news.drawing, self._shown, self._tokenizer.vocab_size)
        return value

    def _released(self, choice: Choice, text: str) -> str:
        """Text of an answer that may be a call is held back until that is decided."""
        choice.held += text
        if choice.calls:
            return ""
        undecided = self.order.must_call or tools.may_become_call(choice.held)
        if undecided and not choice.speaks and choice.end is None:
            return ""
        choice.speaks = True
        text, choice.held = choice.held, ""
        return text

    def last_chunk(self) -> str:
        """The chunk with the usage."""
        return dumps({**self._chunk_head, "choices": [], "usage": self.usage()})

    # --- figures ------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens, and what they cost."""
        order = self.order
        ends = [choice.end for choice in self.choices if choice.end is not None]
        prompt = sum(len(job.tokens) for job in order.jobs)
        done = 0 if order.silent else sum(len(end.tokens) for end in ends)
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
                "method": order.jobs[0].method,
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
        """A token as text; parts of characters, which are none, as their bytes."""
        found = self._spelled.get(token)
        if found is None:
            data = self._tokenizer.token_bytes(token)
            try:
                found = data.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._spelled[token] = found
        return found

    def _logprobs(self, choice: Choice, rows: Sequence[Any], *, first: bool) -> Any:
        if self.order.logprobs is None:
            return None
        if self.order.chat:
            if choice.end is not None and choice.end.reason == "stop" and rows and rows[-1]:
                said = rows[-1][0][0] not in self._tokenizer.eos_ids
                rows = rows if said else rows[:-1]  # the mark of the end is no part of the answer
            found = [self._chat_row(row) for row in rows if row is not None]
            return {"content": found, "refusal": None}
        rows = [] if self.order.silent else list(rows)
        place = choice.index // self.order.samples
        if first and self.order.echo is not None:
            job = self.order.jobs[place]
            about = self.prompts.get(place) or [None] * len(job.tokens)
            known = [
                row if row is not None else ((token, None),)
                for row, token in zip(about, job.tokens, strict=True)
            ]
            rows = known + rows
        return self._completion_rows(choice, rows)

    def _chat_row(self, row: Any) -> dict[str, Any]:
        (token, value), *top = row
        return {
            **self._entry(token, value),
            "top_logprobs": [self._entry(t, v) for t, v in top[: self.order.logprobs or 0]],
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._shown(token), "logprob": value, "bytes": list(data)}

    def _completion_rows(self, choice: Choice, rows: Sequence[Any]) -> dict[str, Any]:
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
            best = {self._shown(t): v for t, v in top[: self.order.logprobs or 0]}
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
