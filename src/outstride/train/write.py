"""write-data: a model writes the words that its own trained parts learn from.

A text begins with a prompt. Either somebody gives it, or the model writes it itself: it is shown its
own chat opening up to where the user's words begin, some of the time with the stem of a task behind
it, and what it writes until it closes the user's turn is a prompt. Then it answers that prompt, some
of the time greedily and else by sampling. Passages that a task needs it writes itself, or they are
put together from answers that it wrote before, which makes long prompts cheap.

A text is a function of the seed and of its number, whatever else is in flight, so a corpus can be
written by several processes, broken off and gone on with, and always is the same. Prompts that a
text of a lower number has already are dropped, as are empty and overlong ones.
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
from outstride.engine.ledger import Progress
from outstride.errors import InvalidData, InvalidParams, InvalidPrompt, UnsupportedModel
from outstride.llm import LLM
from outstride.train.stems import passage, pieces, stem
from outstride.train.words import Text, Words

_MARK = "words of a user"
_PASSAGE = 2
"""A passage may be so many times as long as a prompt."""
_TOP_P = 0.92
"""Of what the model writes for prompts: the last few percent of probability are noise."""
_SHORTEST = 40
"""Characters of a passage that are worth a task."""
_LEAST = 64
"""Tokens of the shortest passage that is put together."""
_SENTENCE = re.compile(r"[.!?][\"')\]]*(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written; equal orders give equal words."""

    seed: int = 0
    temperature: float = 1.0
    """Of the prompts that the model writes."""
    greedy: float = 0.6
    """The share of answers that are greedy."""
    answer_temperature: float = 0.8
    """Of the others."""
    kinds: float = 0.75
    """The share of the model's own prompts that begin with a stem."""
    max_prompt: int = 96
    max_answer: int = 384
    prompts: tuple[str, ...] = ()
    """Prompts that are given: they come first."""
    passages: str = ""
    """A folder of words whose answers are the passages; every prompt then is about some of them."""
    max_passage: int = 900
    """Tokens of the passages of a prompt, if they come from a folder."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.greedy <= 1.0 or not 0.0 <= self.kinds <= 1.0:
            raise InvalidParams("the shares of greedy answers and of kinds lie between 0 and 1")
        if self.max_prompt < 8 or self.max_answer < 1:
            raise InvalidParams("prompts may have 8 tokens or more, answers 1 or more")
        if self.max_passage < _LEAST:
            raise InvalidParams(f"passages may have {_LEAST} tokens or more")
        if self.temperature <= 0.0 or self.answer_temperature <= 0.0:
            raise InvalidParams("temperatures are above 0; for greedy answers alone, say greedy=1")

    @property
    def longest(self) -> int:
        """About how long a text may become."""
        prompt = 3 * _PASSAGE * self.max_prompt // 2
        if self.passages:
            prompt = max(prompt, self.max_passage + self.max_prompt)
        return prompt + 64 + self.max_answer

    def about(self) -> dict[str, Any]:
        """For words.json: everything, with digests in place of the given prompts and passages."""
        listed = hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()[:16]
        given = {"prompts": len(self.prompts), "prompts_digest": listed}
        found = {**asdict(self), **given}
        if self.passages:
            found["passages"] = Words.open(self.passages).digest()
        else:
            del found["passages"], found["max_passage"]
        return found


@dataclass(frozen=True, slots=True)
class Passages:
    """Answers of a folder of words, to put passages together from."""

    tokens: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]
    """[n, 2]: where answers begin and end."""

    @classmethod
    def read(cls, folder: str, vocabulary: str) -> Passages:
        shards = list(Words.open(folder, vocabulary).shards())
        offsets = np.cumsum([0, *(len(shard.tokens) for shard in shards)])
        bounds = [np.zeros((0, 2), np.int64)]
        for offset, shard in zip(offsets.tolist(), shards, strict=False):
            stops = np.append(shard.starts, len(shard.tokens))[1:] - 1  # without the end
            found = np.stack([shard.starts + shard.prompts, stops], axis=1) + offset
            bounds.append(found[found[:, 1] - found[:, 0] >= _LEAST // 2])
        if not sum(map(len, bounds)):
            raise InvalidData(f"{folder} holds no answers that are long enough for passages")
        tokens = np.concatenate([shard.tokens for shard in shards])
        return cls(tokens, np.concatenate(bounds))

    def draw(self, random: Random, most: int) -> list[list[int]]:
        """Some answers that together have up to `most` tokens; short ones as likely as long ones."""
        least = min(_LEAST, most)
        room = round(least * (most / least) ** random.random())
        found: list[list[int]] = []
        while room >= _LEAST // 2:
            start, stop = self.bounds[random.randrange(len(self.bounds))].tolist()
            found.append(self.tokens[start : min(stop, start + room)].tolist())
            room -= len(found[-1])
        return found


@dataclass(frozen=True, slots=True)
class Opening:
    """What a chat template puts before and behind the user's words."""

    before: str
    closing: tuple[int, ...]
    """Tokens that close the user's turn."""
    stop: tuple[str, ...]
    """The same as text, where it is no token."""

    @classmethod
    def of(cls, llm: LLM) -> Opening:
        """Of a model, which has to have a chat template and decode from left to right."""
        tokenizer = llm.tokenizer
        if llm.default_method != "plain":
            raise UnsupportedModel(f"{llm.name} does not write from left to right")
        if tokenizer.chat_template is None:
            raise UnsupportedModel(
                f"{llm.name} has no chat template, and so no opening to write prompts from; "
                "use a model that was tuned for chat"
            )
        whole = tokenizer.chat([{"role": "user", "content": _MARK}])
        before, found, behind = whole.partition(_MARK)
        if not found:
            raise InvalidPrompt(f"the chat template of {llm.name} does not show the user's words")
        ids = tokenizer.encode(behind, add_special=False)
        if ids and tokenizer.is_special(ids[0]):
            return cls(before, (ids[0],), ())
        return cls(before, (), (behind.strip()[:8],) if behind.strip() else ())


@dataclass(slots=True)
class _Draft:
    """A text on its way: the user's turn so far, and what is still to be written of it."""

    number: int
    said: str
    gaps: list[str]
    """Gaps and the literal texts behind them, in turns."""
    share: int = 0
    """Tokens of each passage, where they come from a folder."""
    stage: int = 0
    answering: bool = False
    sampled: bool = False

    def fill(self, written: str) -> None:
        """Puts a text in the next gap."""
        self.said += written + self.gaps[1]
        self.gaps, self.stage = self.gaps[2:], self.stage + 1


@dataclass(slots=True)
class Scribe:
    """Writes texts by number through one engine, and keeps that full.

    Requests wait until an eighth of the engine is free and are then taken in together: passes that
    read prompts take longer than passes in which everybody says one more token.
    """

    llm: LLM
    order: Order
    concurrency: int
    numbers: Callable[[], int | None]
    """The next number to write, or None if that is enough."""
    done: Callable[[int, Text | None], None]
    """Told of every number: the text, or None if the prompt was thrown away."""
    opening: Opening = field(init=False)
    passages: Passages | None = field(init=False)
    _drafts: dict[int, _Draft] = field(default_factory=dict)
    """By the id of the request that is under way."""
    _next: list[tuple[_Draft, list[int], SamplingParams]] = field(default_factory=list)
    """Requests to hand in."""

    def __post_init__(self) -> None:
        self.opening = Opening.of(self.llm)
        folder, digest = self.order.passages, self.llm.tokenizer.digest
        self.passages = Passages.read(folder, digest) if folder else None

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Writes until there are no more numbers and nothing is under way, or until told to stop."""
        engine, plain = self.llm.engine, self.llm.method("plain")
        more, batch = True, max(1, self.concurrency // 8)
        while (more or self._next or engine.busy) and not stop():
            free = self.concurrency - len(self._drafts)
            if free >= batch or not engine.busy:
                while more and len(self._next) < free:
                    number = self.numbers()
                    more = number is not None
                    if number is not None:
                        self._begin(number)
                for draft, tokens, params in self._next[:free]:
                    sequence = engine.submit(tokens, params, plain, watched=False)
                    self._drafts[sequence.id] = draft
                del self._next[:free]
            if engine.busy:
                engine.step(self._tell)

    def _tell(self, news: list[Progress]) -> None:
        for progress in news:
            if progress.finished:
                self._advance(self._drafts.pop(progress.sequence.id), progress.sequence)

    def _begin(self, number: int) -> None:
        order = self.order
        if number < len(order.prompts):
            self._answer(_Draft(number, order.prompts[number], []))
            return
        random = Random(_seed(order.seed, number, "kind"))
        if self.passages is not None:
            pattern = stem(random, about_passages=True)
        else:
            pattern = stem(random) if random.random() < order.kinds else "{rest}"
        first, *gaps = pieces(pattern)
        share = order.max_passage // max(1, gaps.count("passage"))
        self._go_on(_Draft(number, first, gaps, share))

    def _go_on(self, draft: _Draft) -> None:
        """The next gap of a prompt, or its answer."""
        while draft.gaps and draft.gaps[0] == "passage" and self.passages is not None:
            random = Random(_seed(self.order.seed, draft.number, f"prompt {draft.stage}"))
            found = self.passages.draw(random, draft.share)
            text = _whole("\n\n".join(map(self.llm.tokenizer.decode, found)))
            if text is None:
                self.done(draft.number, None)
                return
            draft.fill(text)
        if draft.gaps:
            self._write(draft)
        else:
            self._answer(draft)

    def _write(self, draft: _Draft) -> None:
        """Asks for the next gap of a prompt."""
        order, opening, gap = self.order, self.opening, draft.gaps[0]
        seed = _seed(order.seed, draft.number, f"prompt {draft.stage}")
        if gap == "passage":
            tokens = self.llm.encode(passage(Random(seed)), chat=True)
            params = SamplingParams(
                temperature=order.answer_temperature,
                top_p=_TOP_P,
                seed=seed,
                max_tokens=_PASSAGE * order.max_prompt,
            )
        else:
            tokens = self.llm.tokenizer.encode(opening.before + draft.said, add_special=False)
            params = SamplingParams(
                temperature=order.temperature,
                top_p=_TOP_P,
                seed=seed,
                max_tokens=order.max_prompt,
                stop_token_ids=opening.closing,
                stop=(*opening.stop, "\n") if gap == "line" else opening.stop,
            )
        self._next.append((draft, tokens, params))

    def _advance(self, draft: _Draft, sequence: Running) -> None:
        """Something came back: the next gap, the answer, or the end of it."""
        if sequence.error is not None:
            raise sequence.error
        if draft.answering:
            text = Text(list(sequence.tokens), sequence.prompt_length, draft.sampled)
            self.done(draft.number, text)
            return
        written = self._written(draft.gaps[0], sequence)
        if written is None:
            self.done(draft.number, None)
            return
        draft.fill(written)
        self._go_on(draft)

    def _written(self, gap: str, sequence: Running) -> str | None:
        """The text of a gap, if it is of use."""
        tokenizer, stop = self.llm.tokenizer, sequence.finish_reason == "stop"
        tokens = sequence.output
        ends = {*self.opening.closing, *tokenizer.eos_ids}
        if stop and tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        if any(map(tokenizer.is_special, tokens)):
            return None
        text = tokenizer.decode(tokens)
        for mark in sequence.params.stop:
            text = text.partition(mark)[0]
        if gap == "passage":
            return _whole(text)
        if not stop or "\ufffd" in text:
            return None
        return text.rstrip() if gap == "rest" or text.strip() else None

    def _answer(self, draft: _Draft) -> None:
        order, llm = self.order, self.llm
        said = draft.said.strip()
        tokens = llm.encode(said, chat=True) if said else []
        room = llm.model.context - len(tokens)
        if not said or room < 2:
            self.done(draft.number, None)
            return
        draft.answering = True
        random = Random(_seed(order.seed, draft.number, "answer"))
        draft.sampled = random.random() >= order.greedy
        most = min(order.max_answer, room)
        params = SamplingParams(max_tokens=most)
        if draft.sampled:
            params = SamplingParams(
                max_tokens=most, temperature=order.answer_temperature, seed=random.getrandbits(62)
            )
        self._next.append((draft, tokens, params))


def _whole(text: str) -> str | None:
    """A passage up to the end of its last sentence, if that is of use."""
    ends_at = [found.end() for found in _SENTENCE.finditer(text)]
    text = text[: ends_at[-1]].strip() if ends_at else ""
    return text if len(text) >= _SHORTEST and "\ufffd" not in text else None


def _seed(seed: int, number: int, purpose: str) -> int:
    digest = hashlib.sha256(f"{seed} {number} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
