"""The default model at its real shapes: the right text, and the same bits in every packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.core.graph import NodeId, chain, tree
from outstride.core.proposal import Wants
from outstride.models.gguf_file import GgufFile
from outstride.models.gguf_model import read_config, stored_model
from outstride.models.load import Loaded, load, locate
from tests.models.drive import Hand, logits

pytestmark = pytest.mark.model

TEXT = """The library of Alexandria was one of the largest of the ancient world. It held, by some
accounts, several hundred thousand scrolls, and scholars came from far away to study there. What
became of it is not known for certain to anybody alive; fire, neglect and war are all named as its
end. 1 + 2 = 3."""


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load("smollm2", pages=256, weights="fp32")


@pytest.fixture(scope="module")
def prompt(loaded: Loaded) -> list[int]:
    ids = loaded.tokenizer.encode(TEXT)
    assert len(ids) > 70
    return ids


@pytest.fixture(scope="module")
def whole(loaded: Loaded, prompt: list[int]) -> np.ndarray:
    return Hand(loaded.model, list(range(12))).read(prompt)


def test_it_answers(loaded: Loaded) -> None:
    tokenizer = loaded.tokenizer
    text = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    hand, answer = Hand(loaded.model, list(range(12))), list[int]()
    new = tokenizer.encode(text, add_special=False)
    while len(answer) < 20:
        graph = chain(new, len(hand.positions))
        token = int(hand.run(graph, Wants(), given=len(new)).best[0, 0])
        hand.keep(graph, range(len(new)))
        if token in tokenizer.eos_ids:
            break
        answer.append(token)
        new = [token]
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_chunks(loaded: Loaded, prompt: list[int], whole: np.ndarray) -> None:
    for chunk in (1, 19, 64):
        assert np.array_equal(
            Hand(loaded.model, list(range(40, 20, -1))).read(prompt, chunk), whole
        )


def test_batches(loaded: Loaded, prompt: list[int], whole: np.ndarray) -> None:
    hands = [Hand(loaded.model, list(range(i * 12, i * 12 + 12))) for i in range(6)]
    work = [hand.work(chain(prompt[: 5 + 11 * i])) for i, hand in enumerate(hands)]
    for i, scores in enumerate(loaded.model.forward(work).wait()):
        assert np.array_equal(logits(scores), whole[: 5 + 11 * i])


def test_tree(loaded: Loaded, prompt: list[int]) -> None:
    hand = Hand(loaded.model, list(range(12)))
    hand.read(prompt)
    start = len(prompt)
    shape = [-1, *((i - 1) // 3 for i in range(1, 40))]
    graph = tree([i * 97 % 40000 for i in range(40)], shape, start)
    scored = logits(hand.run(graph))
    for node in (0, 1, 20, 39):
        path = [int(graph.tokens[n]) for n in graph.path(NodeId(node))]
        assert np.array_equal(logits(hand.run(chain(path, start)))[-1], scored[node])


def test_the_same_pass_again(loaded: Loaded, prompt: list[int], whole: np.ndarray) -> None:
    for _ in range(3):
        assert np.array_equal(Hand(loaded.model, list(range(12))).read(prompt), whole)


def test_logits_of_transformers(prompt: list[int], whole: np.ndarray) -> None:
    """Against transformers with the same unpacked weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GgufFile(locate("smollm2"))
    config = read_config(file)
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    model.load_state_dict(stored_model(file, config).read(), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs)
    with torch.inference_mode():
        right = model(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(whole, right, rtol=1e-3, atol=1e-3)
    assert np.array_equal(whole.argmax(axis=1), right.argmax(axis=1))


def test_the_shipped_draft_head_is_read_at_start_and_attached_by_auto() -> None:
    """Until a method drafts with it, passes neither store hidden states for it nor write its KV."""
    with LLM("smollm2", pages=64) as llm:
        params = SamplingParams(max_tokens=12)
        assert not llm.model.draft_heads
        plain = llm.chat("What is the capital of France?", params, method="plain")
        assert not llm.model.draft_heads
        found = llm.chat("What is the capital of France?", params, method="auto")
        assert [head.kind for head in llm.model.draft_heads.values()] == ["block-drafter"]
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
