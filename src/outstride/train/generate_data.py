"""write-data: a model writes the corpus that its own draft heads are trained on.

A text begins with a prompt. Either the user gives it, or the model writes it: it continues its own
chat opening up to where the user's text begins, in a share of cases with a task template after it,
and what it writes until it closes the user's turn is a prompt. Then it answers that prompt, greedily
in a share of cases and else by sampling. Passages that a task needs are written by the model, or
assembled from answers that it wrote before, which makes long prompts cheap.

A text is a function of the seed and of its number, whatever else is in the batch. So a corpus can be
written by several processes, interrupted and resumed, and is always the same. Prompts that a text of
a lower number has already are dropped, as are empty and overlong ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence as Running
from outstride.engine.ledger import SequenceProgress
from outstride.errors import InvalidData, InvalidParams, InvalidPrompt, UnsupportedModel
from outstride.llm import LLM
from outstride.train.corpus_files import Corpus, CorpusText
from outstride.train.prompt_templates import draw_template, passage_request, split_template

_MARK = "words of a user"
_PASSAGE = 2
"""Largest length of a passage in multiples of a prompt's."""
_TOP_P = 0.92
"""Top-p of prompts that the model writes: the last few percent of probability are noise."""
_SHORTEST = 40
"""Characters of the shortest useful passage."""
_MIN_PASSAGE = 64
"""Tokens of the shortest assembled passage."""
_SENTENCE = re.compile(r"[.!?][\"')\]]*(?=\s|$)")


@dataclass(frozen=True, slots=True)
class CorpusSpec:
    """What to write; equal specs give equal texts."""

    seed: int = 0
    temperature: float = 1.0
    """Of the prompts that the model writes."""
    greedy: float = 0.6
    """Share of greedy answers."""
    answer_temperature: float = 0.8
    """Of the sampled answers."""
    template_share: float = 0.75
    """Share of the model's own prompts that begin with a task template."""
    max_prompt: int = 96
    max_answer: int = 384
    prompts: tuple[str, ...] = ()
    """Prompts of the user; they are answered first."""
    passages: str = ""
    """A corpus folder whose answers are the passages; every prompt then is about some of them."""
    max_passage: int = 900
    """Tokens of the passages of a prompt, if they come from a folder."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.greedy <= 1.0 or not 0.0 <= self.template_share <= 1.0:
            raise InvalidParams("the shares of greedy answers and of kinds lie between 0 and 1")
        if self.max_prompt < 8 or self.max_answer < 1:
            raise InvalidParams("prompts may have 8 tokens or more, answers 1 or more")
        if self.max_passage < _MIN_PASSAGE:
            raise InvalidParams(f"passages may have {_MIN_PASSAGE} tokens or more")
        if self.temperature <= 0.0 or self.answer_temperature <= 0.0:
            raise InvalidParams("temperatures are above 0; for greedy answers alone, say greedy=1")

    @property
    def longest(self) -> int:
        """Approximate length of the longest text."""
        prompt = 3 * _PASSAGE * self.max_prompt // 2
        if self.passages:
            prompt = max(prompt, self.max_passage + self.max_prompt)
        return prompt + 64 + self.max_answer

    def about(self) -> dict[str, Any]:
        """For corpus.json: all fields, with digests in place of the prompts and passages."""
        listed = hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()[:16]
        given = {"prompts": len(self.prompts), "prompts_digest": listed}
        found = {**asdict(self), **given}
        if self.passages:
            found["passages"] = Corpus.open(self.passages).digest()
        else:
            del found["passages"], found["max_passage"]
        return found


@dataclass(frozen=True, slots=True)
class PassageSource:
    """Answers of a corpus folder, to assemble passages from."""

    tokens: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]
    """[n, 2]: where answers begin and end."""

    @classmethod
    def read(cls, folder: str, vocabulary: str) -> PassageSource:
        shards = list(Corpus.open(folder, vocabulary).shards())
        offsets = np.cumsum([0, *(len(shard.tokens) for shard in shards)])
        bounds = [np.zeros((0, 2), np.int64)]
        for offset, shard in zip(offsets.tolist(), shards, strict=False):
            stops = np.append(shard.starts, len(shard.tokens))[1:] - 1  # without the end
            found = np.stack([shard.starts + shard.prompts, stops], axis=1) + offset
            bounds.append(found[found[:, 1] - found[:, 0] >= _MIN_PASSAGE // 2])
        if not sum(map(len, bounds)):
            raise InvalidData(f"{folder} holds no answers that are long enough for passages")
        tokens = np.concatenate([shard.tokens for shard in shards])
        return cls(tokens, np.concatenate(bounds))

    def sample(self, random: Random, max_tokens: int) -> list[list[int]]:
        """Answers with up to `max_tokens` tokens together; the length is log-uniform."""
        shortest = min(_MIN_PASSAGE, max_tokens)
        left = round(shortest * (max_tokens / shortest) ** random.random())
        found: list[list[int]] = []
        while left >= _MIN_PASSAGE // 2:
            start, stop = self.bounds[random.randrange(len(self.bounds))].tolist()
            found.append(self.tokens[start : min(stop, start + left)].tolist())
            left -= len(found[-1])
        return found


@dataclass(frozen=True, slots=True)
class ChatOpening:
    """The text of a chat template before and after the user's message."""

    before: str
    closing: tuple[int, ...]
    """Tokens that close the user's turn."""
    stop: tuple[str, ...]
    """The same as text, where it is no token."""

    @classmethod
    def of(cls, llm: LLM) -> ChatOpening:
        """The opening of a model, which must be autoregressive and have a chat template."""
        tokenizer = llm.tokenizer
        if llm.default_method != "plain":
            raise UnsupportedModel(f"{llm.name} is not autoregressive")
        if tokenizer.chat_template is None:
            raise UnsupportedModel(
                f"{llm.name} has no chat template, and so no opening to write prompts from; "
                "use a model that was tuned for chat"
            )
        whole = tokenizer.chat([{"role": "user", "content": _MARK}])
        before, found, behind = whole.partition(_MARK)
        if not found:
            raise InvalidPrompt(
                f"the chat template of {llm.name} does not contain the user's message"
            )
        ids = tokenizer.encode(behind, add_special=False)
        if ids and tokenizer.is_special(ids[0]):
            return cls(before, (ids[0],), ())
        return cls(before, (), (behind.strip()[:8],) if behind.strip() else ())


@dataclass(slots=True)
class _PendingText:
    """A text in progress: the user's turn so far, and what is still to be written of it."""

    number: int
    prompt: str
    fields: list[str]
    """Fields to write and the literal texts after them, alternating."""
    share: int = 0
    """Tokens of each passage, where they come from a folder."""
    stage: int = 0
    answering: bool = False
    sampled: bool = False

    def fill(self, written: str) -> None:
        """Puts a text in the next field."""
        self.prompt += written + self.fields[1]
        self.fields, self.stage = self.fields[2:], self.stage + 1


@dataclass(slots=True)
class CorpusGenerator:
    """Writes texts by number through one engine and keeps its batch full.

    New requests wait until an eighth of the batch is free and are then submitted together, because
    passes with prefill take longer than pure decode passes.
    """

    llm: LLM
    spec: CorpusSpec
    concurrency: int
    numbers: Callable[[], int | None]
    """Returns the next number to write, or None if there are enough."""
    done: Callable[[int, CorpusText | None], None]
    """Called for every number with the text, or None if its prompt was dropped."""
    chat_opening: ChatOpening = field(init=False)
    passages: PassageSource | None = field(init=False)
    _pending: dict[int, _PendingText] = field(default_factory=dict)
    """Texts in progress by the id of their running request."""
    _requests: list[tuple[_PendingText, list[int], SamplingParams]] = field(default_factory=list)
    """Requests to submit."""

    def __post_init__(self) -> None:
        self.chat_opening = ChatOpening.of(self.llm)
        folder, digest = self.spec.passages, self.llm.tokenizer.digest
        self.passages = PassageSource.read(folder, digest) if folder else None

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Writes until there are no more numbers and no request is running, or until `stop` returns
        True.
        """
        engine, plain = self.llm.engine, self.llm.method("plain")
        more, batch = True, max(1, self.concurrency // 8)
        while (more or self._requests or engine.busy) and not stop():
            free = self.concurrency - len(self._pending)
            if free >= batch or not engine.busy:
                while more and len(self._requests) < free:
                    number = self.numbers()
                    more = number is not None
                    if number is not None:
                        self._begin(number)
                for pending, tokens, params in self._requests[:free]:
                    sequence = engine.submit(tokens, params, plain, streaming=False)
                    self._pending[sequence.id] = pending
                del self._requests[:free]
            if engine.busy:
                engine.step(self._finish_requests)

    def _finish_requests(self, progresses: list[SequenceProgress]) -> None:
        for progress in progresses:
            if progress.finished:
                self._advance(self._pending.pop(progress.sequence.id), progress.sequence)

    def _begin(self, number: int) -> None:
        spec = self.spec
        if number < len(spec.prompts):
            self._request_answer(_PendingText(number, spec.prompts[number], []))
            return
        random = Random(_seed(spec.seed, number, "kind"))
        if self.passages is not None:
            pattern = draw_template(random, about_passages=True)
        else:
            pattern = draw_template(random) if random.random() < spec.template_share else "{rest}"
        first, *fields = split_template(pattern)
        share = spec.max_passage // max(1, fields.count("passage"))
        self._continue(_PendingText(number, first, fields, share))

    def _continue(self, pending: _PendingText) -> None:
        """Requests the next field of a prompt, or its answer."""
        while pending.fields and pending.fields[0] == "passage" and self.passages is not None:
            random = Random(_seed(self.spec.seed, pending.number, f"prompt {pending.stage}"))
            found = self.passages.sample(random, pending.share)
            text = _whole("\n\n".join(map(self.llm.tokenizer.decode, found)))
            if text is None:
                self.done(pending.number, None)
                return
            pending.fill(text)
        if pending.fields:
            self._request_field(pending)
        else:
            self._request_answer(pending)

    def _request_field(self, pending: _PendingText) -> None:
        """Requests the next field of a prompt."""
        spec, opening, field_name = self.spec, self.chat_opening, pending.fields[0]
        seed = _seed(spec.seed, pending.number, f"prompt {pending.stage}")
        if field_name == "passage":
            tokens = self.llm.encode(passage_request(Random(seed)), chat=True)
            params = SamplingParams(
                temperature=spec.answer_temperature,
                top_p=_TOP_P,
                seed=seed,
                max_tokens=_PASSAGE * spec.max_prompt,
            )
        else:
            tokens = self.llm.tokenizer.encode(opening.before + pending.prompt, add_special=False)
            params = SamplingParams(
                temperature=spec.temperature,
                top_p=_TOP_P,
                seed=seed,
                max_tokens=spec.max_prompt,
                stop_token_ids=opening.closing,
                stop=(*opening.stop, "\n") if field_name == "line" else opening.stop,
            )
        self._requests.append((pending, tokens, params))

    def _advance(self, pending: _PendingText, sequence: Running) -> None:
        """Handles a finished request: the next field, the answer, or the finished text."""
        if sequence.error is not None:
            raise sequence.error
        if pending.answering:
            text = CorpusText(list(sequence.tokens), sequence.prompt_length, pending.sampled)
            self.done(pending.number, text)
            return
        written = self._field_text(pending.fields[0], sequence)
        if written is None:
            self.done(pending.number, None)
            return
        pending.fill(written)
        self._continue(pending)

    def _field_text(self, field_name: str, sequence: Running) -> str | None:
        """The text of a field, or None if it is unusable."""
        tokenizer, stop = self.llm.tokenizer, sequence.finish_reason == "stop"
        tokens = sequence.output
        ends = {*self.chat_opening.closing, *tokenizer.eos_ids}
        if stop and tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        if any(map(tokenizer.is_special, tokens)):
            return None
        text = tokenizer.decode(tokens)
        for mark in sequence.params.stop:
            text = text.partition(mark)[0]
        if field_name == "passage":
            return _whole(text)
        if not stop or "\ufffd" in text:
            return None
        return text.rstrip() if field_name == "rest" or text.strip() else None

    def _request_answer(self, pending: _PendingText) -> None:
        spec, llm = self.spec, self.llm
        prompt = pending.prompt.strip()
        tokens = llm.encode(prompt, chat=True) if prompt else []
        left = llm.model.context - len(tokens)
        if not prompt or left < 2:
            self.done(pending.number, None)
            return
        pending.answering = True
        random = Random(_seed(spec.seed, pending.number, "answer"))
        pending.sampled = random.random() >= spec.greedy
        max_tokens = min(spec.max_answer, left)
        params = SamplingParams(max_tokens=max_tokens)
        if pending.sampled:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=spec.answer_temperature,
                seed=random.getrandbits(62),
            )
        self._requests.append((pending, tokens, params))


def _whole(text: str) -> str | None:
    """A passage up to the end of its last sentence, or None if it is unusable."""
    ends_at = [found.end() for found in _SENTENCE.finditer(text)]
    text = text[: ends_at[-1]].strip() if ends_at else ""
    return text if len(text) >= _SHORTEST and "\ufffd" not in text else None


def _seed(seed: int, number: int, purpose: str) -> int:
    digest = hashlib.sha256(f"{seed} {number} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
