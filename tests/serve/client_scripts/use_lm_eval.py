"""lm-eval with its remote tokenizer, against the server at the URL of the first argument."""

# mypy: ignore-errors

import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

URL = sys.argv[1]
model = LocalCompletionsAPI(
    model="tiny",
    base_url=f"{URL}/v1/completions",
    tokenizer_backend="remote",
    num_concurrent=2,
    max_length=4096,
    tokenized_requests=False,
)
assert model.tokenizer.eos_token == "<|im_end|>"
assert model.tokenizer.decode(model.tokenizer.encode("in the box")) == "in the box"
text = model.tokenizer.apply_chat_template([{"role": "user", "content": "say"}])
assert text.startswith("<|im_start|>user\nsay")


def instances(kind: str, *arguments: tuple) -> list:
    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)
    ]


pairs = [("the thing", " in the box"), ("in the", " box"), ("a", " b")]
scores = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
assert len(scores) == 3
assert all(score < 0 for score, _ in scores)
again = model.loglikelihood(instances("loglikelihood", pairs[1]), disable_tqdm=True)
assert again[0] == scores[1]
options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
texts = model.generate_until(instances("generate_until", ("in the", options)), disable_tqdm=True)
assert isinstance(texts[0], str)

chat = LocalChatCompletion(
    model="tiny", base_url=f"{URL}/v1/chat/completions", tokenizer_backend=None, num_concurrent=1
)
asked = chat.apply_chat_template([{"role": "user", "content": "say"}])
texts = chat.generate_until(instances("generate_until", (asked, options)), disable_tqdm=True)
assert isinstance(texts[0], str)
print("ok")
