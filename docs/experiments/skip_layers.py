"""How fast a model that was not tuned for it loses its words when it skips layers.

    .venv/bin/python docs/experiments/skip_layers.py --prompts question.jsonl --limit 12

Plain decoding's own greedy answers are written again under `skip-layers`, every token prescribed: how
often the likeliest token is plain's all the same, and what plain's tokens cost in nats, from the token
on with which the budget has fallen to `min_layers`. Then the method writes freely: how many tokens pass
until its text parts from plain's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from itertools import product, takewhile

import numpy as np

from outstride import LLM, SamplingParams, registry
from outstride.bench.prompts import built_in, read_prompts, spread
from outstride.core.graph import BoolArray
from outstride.core.sequence import Sequence

SPAN = 16


class Prescribed:
    """A grammar of one sentence. Log-probabilities are those before it has its say."""

    def __init__(self, answer: list[int], size: int) -> None:
        self.answer, self.size = answer, size

    def allowed(self, output: Seq[int]) -> BoolArray:
        mask = np.zeros(self.size, dtype=np.bool_)
        mask[self.answer[len(output)]] = True
        return mask


def written(llm: LLM, prompt: list[int], spec: str, length: int, answer: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=length, ignore_eos=bool(answer), logprobs=1)
    grammar = Prescribed(answer, llm.model.vocab_size) if answer else None
    sequence = llm.engine.submit(prompt, params, registry.build(spec), grammar=grammar)
    while llm.engine.busy:
        llm.engine.step()
    if sequence.error is not None:
        raise sequence.error
    return sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", help="as for bench decode")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--warm", default="1,4", help="layers that always run (default 1,4)")
    parser.add_argument("--skip", default="1,3,6,15", help="layers to skip (default 1,3,6,15)")
    args = parser.parse_args()
    llm = LLM(args.model)
    registry.discover()
    prompts = read_prompts(args.prompts) if args.prompts else built_in()
    encoded = [llm.encode(prompt.text, chat=True) for prompt in spread(prompts, args.limit)]
    answers = [written(llm, prompt, "plain", args.length, []).output for prompt in encoded]
    layers, rows = llm.model.layers, []
    print("warm  skipped  same token  nats per token  tokens until it parts")
    for warm, skip in product(*(map(int, text.split(",")) for text in (args.warm, args.skip))):
        spec = f"skip-layers:warm={warm},min_layers={layers - skip},span={SPAN}"
        same, nats, apart = [], [], []
        for prompt, answer in zip(encoded, answers, strict=True):
            forced = written(llm, prompt, spec, len(answer), answer)
            for position in range(len(prompt) + SPAN, len(prompt) + len(answer)):
                (token, logprob), *likeliest = forced.logprobs[position]
                same.append(max(likeliest, key=lambda one: one[1])[0] == token)
                nats.append(-logprob)
            free = written(llm, prompt, spec, args.length, []).output
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(free, answer, strict=False))
            apart.append(sum(1 for _ in alike))
        means = [round(float(value), 4) for value in (np.mean(same), np.mean(nats))]
        rows.append([warm, skip, *means, float(np.median(apart))])
        print("{:>4}  {:>7}  {:>10.1%}  {:>14.2f}  {:>8.0f}".format(*rows[-1]), flush=True)
    length = float(np.median([len(answer) for answer in answers]))
    print(json.dumps({"model": args.model, "layers": layers, "length": length, "rows": rows}))


if __name__ == "__main__":
    main()
