"""What would `auto` take if it weighed otherwise? Answers are written once and replayed in seconds.

    python docs/experiments/replay.py PROMPTS --temperature 0.8 --limit 60
    python docs/experiments/replay.py PROMPTS --temperature 0.8 Auto.PATIENCE=8 mix.SAMPLED=0.6

First all answers are written by plain decoding while the trained part is asked at every step; what it
says is kept in a file. Then `auto` goes through them again without the model, under a cost curve that
stands still: the same decisions, no noise of the machine. Printed are its time against plain's, by
group of prompts, and what it did; once with the constants of the tree, and once with those given.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from outstride.bench import prompts as prompt_files
from outstride.core.contracts import Demand
from outstride.core.graph import chain
from outstride.core.guess import Guess
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores
from outstride.draft.auto import Auto
from outstride.engine import scheduler
from outstride.engine.cost import Cost, Drafts
from outstride.llm import LLM

# Milliseconds on two cores of an AMD EPYC (Zen 4), drafts in turns with plain steps.
CURVE = {1: 5.4, 2: 6.25, 4: 6.9, 8: 8.4, 9: 8.9, 16: 12.4, 17: 12.6, 32: 20.0, 64: 38.0}
LOOK, ASK, AFTER = 0.2, 1.7, 0.1
"""What a look costs that leads to no draft; a question to the part; the step behind a draft."""
ORDERS = 4
"""So often all are replayed, each time in another order."""


@dataclass
class Answer:
    """A text as it was written, and what the part said at each position."""

    group: str
    prompt: list[int]
    said: list[int]
    params: SamplingParams
    guesses: dict[int, tuple[Any, Any]] = field(default_factory=dict)


class Asking(Auto):
    """Asks the part at every step and drafts nothing."""

    weighed = False
    heard: dict[int, tuple[Any, Any]]

    def demand(self, view: Any) -> Demand:
        able = view.state is not None and view.pending() == 1 and view.limit - view.end > 1
        return Demand(most=1, gain=1.0) if able else Demand()

    def propose(self, view: Any, room: int) -> Any:
        if view.state is not None and room > 0 and self._trained is not None:
            asked = self._trained.guess(view, room)
            scores = yield next(asked)
            self.heard[int(view.end)] = np.array(scores.best), np.array(scores.values)
            asked.close()
        return Guess().proposal(view)

    def observe(self, view: Any, proposal: Any, scores: Any, verdict: Any) -> Any:
        return view.state or self._begin(view)


def written(llm: LLM, args: argparse.Namespace, part: str) -> list[Answer]:
    """All answers, from the file if they were written before."""
    listed = prompt_files.spread(prompt_files.read_prompts(args.prompts), args.limit)
    key = f"{llm.fingerprint} {args.temperature} {[p.text for p in listed]}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    kept = Path.home() / ".cache" / "outstride" / "replay" / name
    if kept.exists():
        found: list[Answer] = pickle.loads(kept.read_bytes())
        return found
    asking, answers = Asking(from_=part), list[Answer]()
    method = replace(llm.method("auto"), drafter=asking)
    for number, prompt in enumerate(listed, start=1):
        params = SamplingParams(max_tokens=160, temperature=args.temperature, seed=0)
        asking.heard = {}
        [result] = llm.chat([[{"role": "user", "content": prompt.text}]], params, method=method)
        said = list(result.outputs[0].token_ids)
        prompt_ids = list(result.prompt_token_ids)
        answers.append(Answer(prompt.group, prompt_ids, said, params, asking.heard))
        print(f"\rwritten {number} of {len(listed)}", end="", flush=True)
    print()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps(answers))
    return answers


class Seen:
    """What `auto` sees of a sequence, as `core.sequence.View` would show it."""

    chunk, company, index, salt = 256, 1, 0, ""

    def __init__(self, sequence: Any, own: Any = None) -> None:
        self.sequence, self.own = sequence, own
        self.ask, self.prices = False, ()

    def with_state(self, state: Any) -> Seen:
        view = Seen(self.sequence, (state,))
        view.ask, view.prices = self.ask, self.prices
        return view

    @property
    def state(self) -> Any:
        return self.sequence.state if self.own is None else self.own[0]

    @property
    def end(self) -> int:
        return len(self.sequence.tokens)

    @property
    def seed(self) -> int:
        return self.sequence.params.seed or 0

    def __getattr__(self, name: str) -> Any:  # tokens, limit, params, prompt_length, clock
        return getattr(self.sequence, name)

    def pending(self) -> int:
        return 1

    def given(self) -> Any:
        return chain([self.sequence.tokens[-1]], self.end - 1)

    def graft(self, name: str) -> Any:
        return self.sequence.graft


def weighed(demand: Demand, cost: Cost) -> tuple[int, bool, tuple[float, ...]]:
    """How many nodes a lone sequence is granted, whether it asks, and what nodes have to promise.

    What `Scheduler` works out for a whole batch.
    """
    curve = cost.curve(129)

    def worth(gains: tuple[float, ...], kind: Drafts) -> tuple[float, int]:
        base, tokens, best = cost.drafting(1, kind), 1.0, (scheduler.PROMISE / curve[1], 0)
        for count, gain in enumerate(gains, start=1):
            tokens += gain
            best = max(best, (tokens / (base + curve[1 + count]), count), key=lambda b: b[0])
        return best

    looked, asked = worth(demand.gains, Drafts.LOOKED), worth(demand.asking, Drafts.ASKED)
    if not demand.asking or asked[0] <= looked[0]:
        return looked[1], False, ()
    room = min(2 * asked[1], len(demand.asking))
    return room, True, tuple(asked[0] * (curve[n + 2] - curve[n + 1]) for n in range(room))


def held(proposal: Proposal, left: list[int]) -> int:
    """How many drafted tokens are those that follow."""
    parents, tokens = proposal.graph.parents.tolist(), proposal.graph.tokens.tolist()
    at = proposal.given - 1
    for count, token in enumerate(left):
        below = [n for n in range(at + 1, len(tokens)) if parents[n] == at and tokens[n] == token]
        if not below:
            return count
        at = below[0]
    return len(left)


def replayed(answer: Answer, auto: Auto, graft: Any, cost: Cost, did: dict[str, int]) -> float:
    """Seconds that `auto` would have taken for an answer behind its prompt."""
    limit = len(answer.prompt) + answer.params.max_tokens
    sequence = SimpleNamespace(
        tokens=[*answer.prompt, answer.said[0]],
        prompt_length=len(answer.prompt),
        params=answer.params,
        limit=limit,
        graft=graft,
        clock=did["passes"],
        state=None,
    )
    first = Proposal(chain([0], 0), 1)
    sequence.state = auto.observe(Seen(sequence), first, None, SimpleNamespace(settled=(0,)))  # type: ignore[arg-type]
    seconds, steps, asleep, done, drafted = 0.0, 1, 0, 1, 0
    while done < len(answer.said):
        sequence.clock += 1
        view: Any = Seen(sequence)
        demand = Demand()
        if looks := steps >= asleep:
            demand = auto.demand(view)
            asleep, looks = steps + demand.rest, not demand.rest
        room, view.ask, view.prices = weighed(demand, cost)
        proposal, asks = Proposal(view.given(), 1), 0
        if room:
            rounds = auto.propose(view, room)
            try:
                next(rounds)
                while True:
                    asks += 1
                    best, values = answer.guesses[view.end]
                    rounds.send(Scores(np.arange(len(best)), best, values=values))
            except StopIteration as stop:
                proposal = stop.value
        seconds += AFTER * 1e-3 * (drafted > 0)
        drafted = len(proposal.graph) - proposal.given
        fresh = answer.said[done : done + 1 + held(proposal, answer.said[done:-1])]
        sequence.tokens += fresh
        done, steps = done + len(fresh), steps + 1
        if steps > asleep:
            verdict: Any = SimpleNamespace(settled=tuple(fresh))
            sequence.state = auto.observe(view, proposal, None, verdict)  # type: ignore[arg-type]
        seconds += cost.curve(129)[1 + drafted]
        seconds += 1e-3 * (ASK * asks + LOOK * (looks and not drafted))
        for name, count in (("passes", 1), ("looks", looks), ("asked", asks), ("nodes", drafted)):
            did[name] += count
        did["held"] += len(fresh) - 1
    return seconds


@contextmanager
def constants(given: list[str]) -> Iterator[None]:
    """Sets `Class.NAME=value` of auto, mix or promises, or `mix.NAME=value`, for a while."""
    kept = []
    modules = [importlib.import_module(f"outstride.draft.{n}") for n in ("auto", "mix", "promises")]
    for setting in given:
        place, value = setting.split("=")
        owner, name = place.split(".")
        holder: Any = next((vars(m)[owner] for m in modules if owner in vars(m)), None)
        holder = holder or next(m for m in modules if m.__name__.endswith(owner))
        kept.append((holder, name, name in vars(holder), getattr(holder, name)))
        setattr(holder, name, type(getattr(holder, name))(float(value)))
    yield
    for holder, name, own, before in kept:
        setattr(holder, name, before) if own else delattr(holder, name)


def told(title: str, answers: list[Answer], part: str, graft: Any) -> None:
    """Prints what comes of it; what is learnt depends on who comes first, so in several orders."""
    ratios: dict[str, list[float]] = {}
    did = dict.fromkeys(("passes", "looks", "asked", "nodes", "held"), 0)
    for order in range(ORDERS):
        shuffled = [answer for answer in answers if len(answer.said) > 1]
        random.Random(order).shuffle(shuffled)
        auto, cost = Auto(from_=part), Cost({n: t * 1e-3 for n, t in CURVE.items()}, frozen=True)
        for answer in shuffled:
            seconds = replayed(answer, auto, graft, cost, did)
            plain = (len(answer.said) - 1) * CURVE[1] * 1e-3
            ratios.setdefault(answer.group, []).append(plain / seconds)
    means = {group: sum(found) / len(found) for group, found in sorted(ratios.items())}
    print(f"{title}: {sum(means.values()) / len(means):.3f} times plain")
    print("  " + ", ".join(f"{group} {mean:.3f}" for group, mean in means.items()))
    print("  " + ", ".join(f"{count / ORDERS:.0f} {name}" for name, count in did.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("prompts", help="a .jsonl file, as for `outstride bench decode`")
    parser.add_argument("constants", nargs="*", help="Class.NAME=value of auto, mix or promises")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit", type=int)
    args = parser.parse_intermixed_args()
    with LLM("smollm2") as llm:
        llm.chat([[{"role": "user", "content": "hi"}]], SamplingParams(max_tokens=2), method="auto")
        [(part, graft)] = llm.engine.passes.setting.grafts.items()
        answers = written(llm, args, part)
        told("as it is", answers, part, graft)
        if args.constants:
            with constants(args.constants):
                told(" ".join(args.constants), answers, part, graft)


if __name__ == "__main__":
    main()
