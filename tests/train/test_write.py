"""write-data: a corpus that is a function of its order, however often it is broken off."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outstride import LLM, SamplingParams
from outstride.errors import InvalidData, InvalidParams, OutstrideError, UnsupportedModel
from outstride.models.load import load_tokenizer
from outstride.train import corpus, stems
from outstride.train.corpus import Desk, Engines, Goal, Standing
from outstride.train.words import Text, Words
from outstride.train.write import Opening, Order
from tests.serve import tiny

GIVEN = ("Hello there", "How are you?", "Hello there", " ", "Say it again")
ORDER = Order(seed=3, max_prompt=12, max_answer=10, prompts=GIVEN, kinds=0.5)
ABOUT = {"model": "tiny", "vocabulary": "-", "vocab_size": 300, "end": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that closes turns soon and speaks ASCII: one direction of its states is for that."""
    from safetensors.torch import load_file, save_file

    folder = tiny.make(tmp_path_factory.mktemp("model") / "tiny")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    end = load_tokenizer(str(folder)).token_id("<|im_end|>")
    tensors["model.embed_tokens.weight"][:, 0] = 5.0
    for layer in range(2):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][0] = 0.0
    head = tensors["lm_head.weight"]
    head[:, 0], head[:94, 0], head[end, 0] = 0.0, 8.0, 16.0
    save_file(tensors, path)
    return str(folder)


def quiet(standing: Standing) -> None:
    assert 0.0 <= standing.share <= 1.0
    assert standing.left >= 0.0


def write(
    model: str, folder: Path, tokens: int, order: Order = ORDER, workers: int = 1, at_once: int = 8
) -> list[Text]:
    words = Words.create(folder, {**ABOUT, "order": order.about()})
    desk = Desk.at(words, Goal(tokens=tokens), quiet)
    corpus.write(Engines(model, "fp32", at_once, workers), order, desk)
    return read(folder)


def read(folder: Path) -> list[Text]:
    return [text for shard in Words.open(folder).shards() for text in shard.texts()]


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    return write(model, tmp_path_factory.mktemp("whole") / "w", 150)


def test_texts_are_prompts_in_chat_format_with_their_own_answers(
    model: str, whole: list[Text]
) -> None:
    assert sum(len(text.tokens) - text.prompt for text in whole) >= 150
    assert sum(len(text.tokens) - text.prompt for text in whole[:-1]) < 150
    with LLM(model, weights="fp32") as llm:
        special = llm.tokenizer.token_id("<|im_start|>")
        for text in whole:
            prompt = list(text.tokens[: text.prompt])
            said = llm.tokenizer.decode(prompt, skip_special=False)
            assert said.startswith("<|im_start|>user\n")
            assert said.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert prompt.count(special or -1) == 2
            if not text.sampled:
                [answer] = llm.generate(prompt, SamplingParams(max_tokens=ORDER.max_answer))
                assert [*prompt, *answer.token_ids] == text.tokens
        given = [llm.encode(prompt, chat=True) for prompt in GIVEN]
    prompts = [text.tokens[: text.prompt] for text in whole]
    assert prompts[:3] == [given[0], given[1], given[4]]  # without the double and the empty one
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert len(prompts) > 6
    assert {text.sampled for text in whole} == {True, False}


@pytest.mark.parametrize("at_once", [1, 3, 40])
def test_company_changes_nothing(
    at_once: int, model: str, whole: list[Text], tmp_path: Path
) -> None:
    assert write(model, tmp_path / "w", 150, at_once=at_once) == whole


def test_two_processes_write_the_same(model: str, whole: list[Text], tmp_path: Path) -> None:
    assert write(model, tmp_path / "w", 150, workers=2) == whole


def test_other_seeds_write_other_words(model: str, whole: list[Text], tmp_path: Path) -> None:
    found = write(model, tmp_path / "w", 150, replace(ORDER, seed=4))
    assert found[:2] != whole[:2] or found[3:] != whole[3:]
    assert found[5:] != whole[5:]


def test_it_goes_on_where_it_was(model: str, whole: list[Text], tmp_path: Path) -> None:
    short = write(model, tmp_path / "w", 60)
    assert len(short) < len(whole)
    assert short == whole[: len(short)]
    assert write(model, tmp_path / "w", 60) == short
    desk = Desk.at(Words.open(tmp_path / "w"), Goal(tokens=60), quiet)
    assert desk.full
    assert desk.next > desk.texts == len(short)  # those that were dropped are not tried again
    assert write(model, tmp_path / "w", 150) == whole
    assert Words.open(tmp_path / "w").about["texts"] == len(whole)


def test_ctrl_c_leaves_whole_texts(
    model: str, whole: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Desk.take, 0

    def take(self: Desk, number: int, text: Text | None) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            signal.raise_signal(signal.SIGINT)
        real(self, number, text)

    with monkeypatch.context() as patch:
        patch.setattr(Desk, "take", take)
        with pytest.raises(KeyboardInterrupt):
            write(model, tmp_path / "w", 150)
    part = read(tmp_path / "w")
    assert 0 < len(part) < len(whole)
    assert part == whole[: len(part)]
    assert write(model, tmp_path / "w", 150) == whole


def test_a_kill_leaves_the_shards_that_were_written(
    model: str, whole: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PER_SHARD", 4)
    with monkeypatch.context() as patch:
        patch.setattr(Words, "note", _raise_on_the_second())
        with pytest.raises(SystemError):
            write(model, tmp_path / "w", 150)
    assert read(tmp_path / "w") == whole[:4]
    assert write(model, tmp_path / "w", 150) == whole
    assert [len(shard) for shard in Words.open(tmp_path / "w").shards()][:2] == [4, 4]


def _raise_on_the_second() -> Any:
    real, calls = Words.note, 0

    def note(self: Words, **counts: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise SystemError
        real(self, **counts)

    return note


def test_minutes(model: str, tmp_path: Path, whole: list[Text]) -> None:
    words = Words.create(tmp_path / "w", {**ABOUT, "order": ORDER.about()})
    desk = Desk.at(words, Goal(minutes=0.01), quiet)
    corpus.write(Engines(model, "fp32", 8), ORDER, desk)
    found = read(tmp_path / "w")
    both = min(len(found), len(whole))
    assert both > 0
    assert found[:both] == whole[:both]
    assert desk.texts == len(found)


def test_a_process_that_dies_is_an_error(model: str, tmp_path: Path) -> None:
    words = Words.create(tmp_path / "w", {**ABOUT})
    desk = Desk.at(words, Goal(tokens=10), quiet)
    with pytest.raises(OutstrideError, match="no file or folder"):
        corpus.write(Engines(str(tmp_path / "none"), "fp32", 8, 2), ORDER, desk)


def test_a_model_that_never_closes_a_turn_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "HOPELESS", 20)
    model = str(tiny.make(tmp_path / "tiny"))
    with pytest.raises(OutstrideError, match="none was of use"):
        write(model, tmp_path / "w", 150, Order(max_prompt=8, max_answer=8))


def test_models_that_cannot_write(model: str) -> None:
    with pytest.raises(UnsupportedModel, match="left to right"), LLM("parallel-full") as llm:
        Opening.of(llm)
    with LLM(model, weights="fp32") as llm:
        llm.tokenizer.chat_template = None
        with pytest.raises(UnsupportedModel, match="no chat template"):
            Opening.of(llm)


@pytest.mark.parametrize(
    ("template", "closing", "stop"),
    [
        ("{{ messages[0]['content'] }}<|end|>", 1, 0),
        ("User: {{ messages[0]['content'] }}\nBot:", 0, 1),
    ],
)
def test_openings(template: str, closing: int, stop: int, model: str) -> None:
    with LLM(model, weights="fp32") as llm:
        llm.tokenizer.chat_template = template
        found = Opening.of(llm)
    assert (len(found.closing), len(found.stop)) == (closing, stop)
    assert found.before == ("User: " if stop else "")


@pytest.mark.parametrize(
    "wrong",
    [{"greedy": 2.0}, {"kinds": -0.1}, {"max_prompt": 1}, {"max_answer": 0}, {"temperature": 0.0}],
)
def test_orders_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        Order(**wrong)


@pytest.mark.parametrize(
    "wrong", [{}, {"tokens": 1, "minutes": 1.0}, {"tokens": 0}, {"minutes": 0.0}]
)
def test_goals_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        Goal(**wrong)


def _all_stems() -> Iterator[str]:
    yield from (pattern for kind in stems.STEMS.values() for pattern in kind)


def test_stems_know_their_holes_and_give_every_kind() -> None:
    known = {*stems.GAPS, *stems.SLOTS, "number"}
    for pattern in _all_stems():
        holes = stems.pieces(pattern)[1::2]
        assert set(holes) <= known
        assert set(holes) & set(stems.GAPS)
        assert not pattern.endswith(" ")
    for pattern in stems.PASSAGES:
        assert set(stems.pieces(pattern)[1::2]) <= known - set(stems.GAPS)
    assert set(stems.WEIGHTS) <= set(stems.STEMS)
    drawn = {stems.stem(Random(i)) for i in range(3000)}
    assert len(drawn) > 500
    assert all(set(stems.pieces(text)[1::2]) <= set(stems.GAPS) for text in drawn)
    assert stems.stem(Random(5)) == stems.stem(Random(5))


def test_passages_are_put_together_from_answers_of_a_folder(model: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    lines = [f"Answer number {i} has a few words. They end here." for i in range(30)]
    texts = [Text([0, *tokenizer.encode(line, add_special=False), 0], 1, False) for line in lines]
    about = {**ABOUT, "vocabulary": tokenizer.digest, "vocab_size": 512}
    Words.create(tmp_path / "words", about).append(texts, len(texts))
    order = Order(
        seed=2, max_prompt=24, max_answer=10, passages=str(tmp_path / "words"), max_passage=200
    )
    found = write(model, tmp_path / "long", 60, order)
    said = [tokenizer.decode(text.tokens[: text.prompt]) for text in found]
    assert all(any(line in prompt for line in lines) for prompt in said)
    assert max(sum(line in prompt for line in lines) for prompt in said) > 1
    assert found == write(model, tmp_path / "again", 60, order, workers=2)
    other = Order(seed=2, passages=str(tmp_path / "words"), max_passage=100)
    with pytest.raises(InvalidData, match="written otherwise"):
        write(model, tmp_path / "long", 60, other)
    Words.open(tmp_path / "words").append(texts[:1], len(texts) + 1)
    with pytest.raises(InvalidData, match="written otherwise"):  # other passages, other prompts
        write(model, tmp_path / "long", 600, order)


def test_a_folder_without_answers_makes_no_passages(model: str, tmp_path: Path) -> None:
    about = {**ABOUT, "vocabulary": load_tokenizer(model).digest}
    Words.create(tmp_path / "words", about)
    with pytest.raises(InvalidData, match="long enough"):
        write(model, tmp_path / "long", 60, Order(passages=str(tmp_path / "words")))
    with pytest.raises(InvalidParams, match="passages may have"):
        Order(max_passage=5)
