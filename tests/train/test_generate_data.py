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
from outstride.train import corpus, prompt_templates
from outstride.train.corpus import CorpusEngines, CorpusGoal, CorpusProgress, CorpusWriter
from outstride.train.corpus_files import Corpus, CorpusText
from outstride.train.generate_data import ChatOpening, CorpusSpec
from tests.serve import tiny

GIVEN = ("Hello there", "How are you?", "Hello there", " ", "Say it again")
ORDER = CorpusSpec(seed=3, max_prompt=12, max_answer=10, prompts=GIVEN, template_share=0.5)
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


def quiet(standing: CorpusProgress) -> None:
    assert 0.0 <= standing.share <= 1.0
    assert standing.left >= 0.0


def write(
    model: str,
    folder: Path,
    tokens: int,
    order: CorpusSpec = ORDER,
    workers: int = 1,
    at_once: int = 8,
) -> list[CorpusText]:
    words = Corpus.create(folder, {**ABOUT, "order": order.about()})
    desk = CorpusWriter.at(words, CorpusGoal(tokens=tokens), quiet)
    corpus.write(CorpusEngines(model, "fp32", at_once, workers), order, desk)
    return read(folder)


def read(folder: Path) -> list[CorpusText]:
    return [text for shard in Corpus.open(folder).shards() for text in shard.texts()]


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[CorpusText]:
    return write(model, tmp_path_factory.mktemp("whole") / "w", 150)


def test_texts_are_prompts_in_chat_format_with_their_own_answers(
    model: str, whole: list[CorpusText]
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
def test_the_batch_changes_nothing(
    at_once: int, model: str, whole: list[CorpusText], tmp_path: Path
) -> None:
    assert write(model, tmp_path / "w", 150, at_once=at_once) == whole


def test_two_processes_write_the_same(model: str, whole: list[CorpusText], tmp_path: Path) -> None:
    assert write(model, tmp_path / "w", 150, workers=2) == whole


def test_other_seeds_write_other_texts(model: str, whole: list[CorpusText], tmp_path: Path) -> None:
    found = write(model, tmp_path / "w", 150, replace(ORDER, seed=4))
    assert found[:2] != whole[:2] or found[3:] != whole[3:]
    assert found[5:] != whole[5:]


def test_it_goes_on_where_it_was(model: str, whole: list[CorpusText], tmp_path: Path) -> None:
    short = write(model, tmp_path / "w", 60)
    assert len(short) < len(whole)
    assert short == whole[: len(short)]
    assert write(model, tmp_path / "w", 60) == short
    desk = CorpusWriter.at(Corpus.open(tmp_path / "w"), CorpusGoal(tokens=60), quiet)
    assert desk.full
    assert desk.next > desk.texts == len(short)  # those that were dropped are not tried again
    assert write(model, tmp_path / "w", 150) == whole
    assert Corpus.open(tmp_path / "w").about["texts"] == len(whole)


def test_ctrl_c_leaves_whole_texts(
    model: str, whole: list[CorpusText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = CorpusWriter.take, 0

    def take(self: CorpusWriter, number: int, text: CorpusText | None) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            signal.raise_signal(signal.SIGINT)
        real(self, number, text)

    with monkeypatch.context() as patch:
        patch.setattr(CorpusWriter, "take", take)
        with pytest.raises(KeyboardInterrupt):
            write(model, tmp_path / "w", 150)
    part = read(tmp_path / "w")
    assert 0 < len(part) < len(whole)
    assert part == whole[: len(part)]
    assert write(model, tmp_path / "w", 150) == whole


def test_a_kill_leaves_the_shards_that_were_written(
    model: str, whole: list[CorpusText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PER_SHARD", 4)
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "note", _raise_on_the_second())
        with pytest.raises(SystemError):
            write(model, tmp_path / "w", 150)
    assert read(tmp_path / "w") == whole[:4]
    assert write(model, tmp_path / "w", 150) == whole
    assert [len(shard) for shard in Corpus.open(tmp_path / "w").shards()][:2] == [4, 4]


def _raise_on_the_second() -> Any:
    real, calls = Corpus.note, 0

    def note(self: Corpus, **counts: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise SystemError
        real(self, **counts)

    return note


def test_minutes(model: str, tmp_path: Path, whole: list[CorpusText]) -> None:
    words = Corpus.create(tmp_path / "w", {**ABOUT, "order": ORDER.about()})
    desk = CorpusWriter.at(words, CorpusGoal(minutes=0.01), quiet)
    corpus.write(CorpusEngines(model, "fp32", 8), ORDER, desk)
    found = read(tmp_path / "w")
    both = min(len(found), len(whole))
    assert both > 0
    assert found[:both] == whole[:both]
    assert desk.texts == len(found)


def test_a_process_that_dies_is_an_error(model: str, tmp_path: Path) -> None:
    words = Corpus.create(tmp_path / "w", {**ABOUT})
    desk = CorpusWriter.at(words, CorpusGoal(tokens=10), quiet)
    with pytest.raises(OutstrideError, match="no file or folder"):
        corpus.write(CorpusEngines(str(tmp_path / "none"), "fp32", 8, 2), ORDER, desk)


def test_a_model_that_never_closes_a_turn_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_UNUSABLE", 20)
    model = str(tiny.make(tmp_path / "tiny"))
    with pytest.raises(OutstrideError, match="none was of use"):
        write(model, tmp_path / "w", 150, CorpusSpec(max_prompt=8, max_answer=8))


def test_models_that_cannot_write(model: str) -> None:
    with pytest.raises(UnsupportedModel, match="not autoregressive"), LLM("parallel-full") as llm:
        ChatOpening.of(llm)
    with LLM(model, weights="fp32") as llm:
        llm.tokenizer.chat_template = None
        with pytest.raises(UnsupportedModel, match="no chat template"):
            ChatOpening.of(llm)


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
        found = ChatOpening.of(llm)
    assert (len(found.closing), len(found.stop)) == (closing, stop)
    assert found.before == ("User: " if stop else "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"greedy": 2.0},
        {"template_share": -0.1},
        {"max_prompt": 1},
        {"max_answer": 0},
        {"temperature": 0.0},
    ],
)
def test_invalid_specs(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        CorpusSpec(**wrong)


@pytest.mark.parametrize(
    "wrong", [{}, {"tokens": 1, "minutes": 1.0}, {"tokens": 0}, {"minutes": 0.0}]
)
def test_goals_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        CorpusGoal(**wrong)


def _all_stems() -> Iterator[str]:
    yield from (pattern for kind in prompt_templates.TEMPLATES.values() for pattern in kind)


def test_templates_have_known_fields_and_cover_every_kind() -> None:
    known = {*prompt_templates.GENERATED_FIELDS, *prompt_templates.LISTED_FIELDS, "number"}
    for pattern in _all_stems():
        holes = prompt_templates.split_template(pattern)[1::2]
        assert set(holes) <= known
        assert set(holes) & set(prompt_templates.GENERATED_FIELDS)
        assert not pattern.endswith(" ")
    for pattern in prompt_templates.PASSAGES:
        assert set(prompt_templates.split_template(pattern)[1::2]) <= known - set(
            prompt_templates.GENERATED_FIELDS
        )
    assert set(prompt_templates.WEIGHTS) <= set(prompt_templates.TEMPLATES)
    drawn = {prompt_templates.draw_template(Random(i)) for i in range(3000)}
    assert len(drawn) > 500
    assert all(
        set(prompt_templates.split_template(text)[1::2]) <= set(prompt_templates.GENERATED_FIELDS)
        for text in drawn
    )
    assert prompt_templates.draw_template(Random(5)) == prompt_templates.draw_template(Random(5))


def test_passages_are_put_together_from_answers_of_a_folder(model: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    lines = [f"Answer number {i} has a few words. They end here." for i in range(30)]
    texts = [
        CorpusText([0, *tokenizer.encode(line, add_special=False), 0], 1, False) for line in lines
    ]
    about = {**ABOUT, "vocabulary": tokenizer.digest, "vocab_size": 512}
    Corpus.create(tmp_path / "corpus", about).append(texts, len(texts))
    order = CorpusSpec(
        seed=2, max_prompt=24, max_answer=10, passages=str(tmp_path / "corpus"), max_passage=200
    )
    found = write(model, tmp_path / "long", 60, order)
    said = [tokenizer.decode(text.tokens[: text.prompt]) for text in found]
    assert all(any(line in prompt for line in lines) for prompt in said)
    assert max(sum(line in prompt for line in lines) for prompt in said) > 1
    assert found == write(model, tmp_path / "again", 60, order, workers=2)
    other = CorpusSpec(seed=2, passages=str(tmp_path / "corpus"), max_passage=100)
    with pytest.raises(InvalidData, match="other options"):
        write(model, tmp_path / "long", 60, other)
    Corpus.open(tmp_path / "corpus").append(texts[:1], len(texts) + 1)
    with pytest.raises(InvalidData, match="other options"):  # other passages, other prompts
        write(model, tmp_path / "long", 600, order)


def test_a_folder_without_answers_makes_no_passages(model: str, tmp_path: Path) -> None:
    about = {**ABOUT, "vocabulary": load_tokenizer(model).digest}
    Corpus.create(tmp_path / "corpus", about)
    with pytest.raises(InvalidData, match="long enough"):
        write(model, tmp_path / "long", 60, CorpusSpec(passages=str(tmp_path / "corpus")))
    with pytest.raises(InvalidParams, match="passages may have"):
        CorpusSpec(max_passage=5)
