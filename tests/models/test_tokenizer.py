"""Tokenizers from folders and from GGUF metadata, and chat templates."""

from __future__ import annotations

import json
import struct
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from outstride.errors import CorruptModel, InvalidPrompt, UnsupportedModel
from outstride.models.load import load_tokenizer, locate
from outstride.models.tokenizer import Tokenizer

TEXTS = [
    "Hello world",
    "  leading spaces\n\n\ttabs",
    "1234567 + 89 = ?",
    "naïve café — “quotes” 日本語 🤗👩‍👩‍👧",
    "def f(x):\n    return x**2  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "I'll we've DON'T it's",
    "a" * 50,
    "\r\n mixed \u00a0 nbsp",
    "",
    "   ",
    "http://x.y/z?q=1&r=2",
    "email@x.com <|endoftext|> end",
    "\x00\x01 control",
    "naïve 日本語 <|im_end|> it's 12\n" * 200,
]


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.mark.model
def test_default_model_against_transformers(default: Tokenizer) -> None:
    from transformers import AutoTokenizer

    path = locate("smollm2")
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        ids = default.encode(text)
        assert ids == theirs(text).input_ids, text
        assert default.decode(ids, skip_special=False) == text
        assert default.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "bye"},
    ]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert default.chat(messages) == wanted


@pytest.mark.model
def test_default_model_by_heart(default: Tokenizer) -> None:
    assert default.encode("<|im_start|>user\nWhat is 12?<|im_end|>\n") == [
        *(1, 4093, 198, 1780, 314, 216, 33, 34, 47, 2, 198)
    ]
    assert default.eos_ids == {2}
    assert default.vocab_size == 49152
    assert default.same_vocabulary(default)
    assert default.token_id("<|im_end|>") == 2
    assert default.is_special(2)
    assert not default.is_special(198)


@pytest.mark.model
def test_bytes_of_tokens_add_up(default: Tokenizer) -> None:
    text = "日本語 🤗 naïve\n"
    assert b"".join(default.token_bytes(i) for i in default.encode(text)) == text.encode()
    smile = default.encode("🤗")
    assert len(smile) > 1
    assert default.decode(smile[:1]) == "\ufffd"


# --- folders --------------------------------------------------------------------------------------


def byte_level(**options: Any) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"he": 256, "llo": 257, "ll": 258}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("ll", "o")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<turn>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 259)])
    return backend


def folder(tmp_path: Path, **config: Any) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    values = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    return tmp_path


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [260, 261]}')
    tokenizer = Tokenizer.from_folder(folder(tmp_path))
    assert tokenizer.bos_id == 259
    assert tokenizer.eos_ids == {260, 261}
    assert tokenizer.encode("hello")[:1] == [259]
    assert tokenizer.encode("hello", add_special=False) == [256, 257]
    assert tokenizer.decode(tokenizer.encode("hello ö</s>")) == "hello ö"
    assert tokenizer.decode([256, 260], skip_special=False) == "he</s>"
    assert tokenizer.decode([9999]) == ""


@pytest.mark.parametrize(
    ("added", "config", "mask"),
    [
        ([], {}, None),
        (["<|mask|>"], {}, 0),
        (["<|mdm_mask|>"], {}, 0),
        (["<|unmask me|>", "|<MASK>|"], {}, 1),
        (["<|a_mask|>", "<|MASK|>"], {}, None),
        (["<|a_mask|>", "<|MASK|>"], {"mask_token": "<|MASK|>"}, 1),
        (["<|a_mask|>", "<gap>"], {"mask_token": {"content": "<gap>"}}, 1),
    ],
)
def test_masks(tmp_path: Path, added: list[str], config: dict[str, Any], mask: int | None) -> None:
    """By name, or the only added token whose letters end in "mask"."""
    backend = byte_level()
    before = backend.get_vocab_size()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in added])
    folder(tmp_path, **config)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).mask_id == (None if mask is None else before + mask)


def with_merges(tmp_path: Path, kind: str) -> Path:
    """A checkpoint's tokenizer as vocabulary and merges, its added tokens in the config."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"he": 256, "ll": 257, "llo": 258}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nll o\n")
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(i): {**plain, "content": text, "special": special}
        for i, text, special in (
            (259, "<end>", True),
            (260, "<think>", False),
            (261, "<|mask|>", True),
        )
    }
    config = {"tokenizer_class": kind, "eos_token": "<end>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(with_merges(tmp_path, "DreamTokenizer"))
    assert (ours.mask_id, sorted(ours.eos_ids)) == (261, [259])
    theirs = transformers.Qwen2Tokenizer.from_pretrained(tmp_path)
    for text in ("hello", " hello  he'll\n\n 123 é", "<think>he<|mask|> llo<end>", "e\u0301"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text), skip_special=False) == unicodedata.normalize(
            "NFC", text
        )
    assert ours.is_special(261)
    assert not ours.is_special(260)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<gap>": 270}))
    assert Tokenizer.from_folder(tmp_path).token_id("<gap>") == 270


def test_merges_of_unknown_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'OtherTokenizer'.*Qwen2Tokenizer"):
        Tokenizer.from_folder(with_merges(tmp_path, "OtherTokenizer"))


def test_templates_of_a_folder(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}{% endfor %}"
    message = [{"role": "user", "content": "x"}]
    tokenizer = Tokenizer.from_folder(folder(tmp_path, chat_template=plain))
    assert tokenizer.chat(message) == "<s>user"
    listed = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert Tokenizer.from_folder(folder(tmp_path, chat_template=listed)).chat(message) == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(tmp_path).chat(message) == "from the file"


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptModel, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def with_template(source: str | None) -> Tokenizer:
    return Tokenizer(byte_level(), chat_template=source, named={"bos_token": "<s>"})


def test_chat_templates() -> None:
    source = """{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
<{{ message.role }}>{% generation %}{{ message.content | tojson }}{% endgeneration %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ extra }}
{%- if strftime_now('%Y') | length == 4 %}!{% endif %}"""
    tokenizer = with_template(source)
    messages = [
        {"role": "skip", "content": ""},
        {"role": "user", "content": "ö <b>"},
    ]
    assert tokenizer.chat(messages, extra="E") == '<user>"ö <b>"<assistant>E!'
    assert tokenizer.chat(messages, add_generation_prompt=False).endswith('<b>"!')
    with pytest.raises(InvalidPrompt, match="no such role"):
        tokenizer.chat([{"role": "bad", "content": ""}])


def test_chat_without_or_with_a_broken_template() -> None:
    with pytest.raises(InvalidPrompt, match="no chat template"):
        with_template(None).chat([])
    with pytest.raises(CorruptModel, match="chat template"):
        with_template("{% if %}").chat([])


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(InvalidPrompt):
        with_template("{{ ''.__class__.__mro__ }}").chat([])
    with pytest.raises(InvalidPrompt):
        with_template("{{ messages.append(1) }}").chat([])


def test_same_vocabulary() -> None:
    one, two = with_template(None), with_template("x")
    assert one.same_vocabulary(two)
    other = byte_level()
    other.add_tokens(["more"])
    assert not one.same_vocabulary(Tokenizer(other))


# --- GGUF metadata --------------------------------------------------------------------------------


def metadata(**changes: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "ll", "llo", "12", "123", "1234", "<s>", "</s>", "<tool>"]
    kinds = [1] * (len(tokens) - 3) + [3, 3, 4]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": ["h e", "l l", "ll o", "1 2", "12 3", "123 4"],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    ids = tokenizer.encode(text, **options)
    return [tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in ids]


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("gpt-2", ["1234"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("default", ["123", "4"]),
    ],
)
def test_how_text_is_cut(pre: str, digits: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata(pre=pre))
    assert pieces(tokenizer, "hello1234", add_special=False) == ["he", "llo", *digits]
    assert tokenizer.decode(tokenizer.encode("hello ö\n 1234")) == "hello ö\n 1234"


def test_special_tokens_of_a_file() -> None:
    tokenizer = Tokenizer.from_gguf(metadata(eot_token_id=262))
    assert pieces(tokenizer, "he</s><tool>") == ["he", "</s>", "<tool>"]
    ids = tokenizer.encode("he</s><tool>")
    assert tokenizer.decode(ids) == "he<tool>"
    assert tokenizer.eos_ids == {262, 263}
    added = Tokenizer.from_gguf(metadata(add_bos_token=True, add_eos_token=True))
    assert pieces(added, "he") == ["<s>", "he", "</s>"]
    assert pieces(added, "he", add_special=False) == ["he"]


def test_composed_characters() -> None:
    text = "e\u0301"
    assert Tokenizer.from_gguf(metadata(pre="qwen2")).decode(
        Tokenizer.from_gguf(metadata(pre="qwen2")).encode(text)
    ) == ("é")


def test_unsupported_tokenizers() -> None:
    with pytest.raises(UnsupportedModel, match=r"'unheard'.*tekken"):
        Tokenizer.from_gguf(metadata(pre="unheard"))
    with pytest.raises(UnsupportedModel, match="bert"):
        Tokenizer.from_gguf(metadata(model="bert"))


def test_vocabularies_that_do_not_fit() -> None:
    with pytest.raises(CorruptModel, match="no vocabulary"):
        Tokenizer.from_gguf({})
    with pytest.raises(CorruptModel, match="kinds"):
        Tokenizer.from_gguf(metadata(token_type=[1]))
    with pytest.raises(CorruptModel, match="merges"):
        Tokenizer.from_gguf(metadata(merges=["zz yy"]))
    with pytest.raises(CorruptModel, match="scores"):
        Tokenizer.from_gguf(metadata(model="llama", scores=[1.0]))


def sentencepiece(**changes: Any) -> Tokenizer:
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "he", "ll"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    scores = [0.0] * 259 + [-100.0] * 5 + [-3.0, -2.0, -1.0, -4.0, -5.0, -6.0, -7.0]
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 12],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in values.items()})


def test_scores_decide_what_merges() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello")
    assert ids[0] == 1
    assert pieces(tokenizer, "hello", add_special=False) == [" hello"]
    assert pieces(tokenizer, "helo", add_special=False) == [" h", "e", "lo"]
    assert tokenizer.decode(ids) == "hello"


def test_bytes_that_no_token_spells() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    ids = tokenizer.encode("hö", add_special=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"h", b"\xc3", b"\xb6"]
    assert tokenizer.decode(ids) == "hö"


def test_no_space_is_taken_from_a_text_that_begins_with_one() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode(" hello", add_special=False)) == " hello"


def test_the_end_of_a_turn_by_its_text() -> None:
    texts = ["<end_of_turn>", "<|return|>", "<|end|>"]
    tokens = ["<unk>", "<s>", "</s>", "a", *texts]

    def ends(kinds: list[int], **more: Any) -> frozenset[int]:
        return sentencepiece(
            tokens=tokens, scores=[0.0] * 7, token_type=[2, 3, 3, 1, *kinds], **more
        ).eos_ids

    assert ends([3, 1, 1]) == {2, 4}
    assert ends([1, 3, 3]) == {2, 5}  # `<|end|>` ends a message, `<|return|>` the turn
    assert ends([3, 1, 1], eot_token_id=6) == {2, 6}
    assert ends([1, 1, 1]) == {2}


def test_named_chat_templates_of_a_file() -> None:
    found = Tokenizer.from_gguf(
        {
            **metadata(),
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_template.tool_use": "with {{ tools | length }}",
            "tokenizer.chat_templates": ["tool_use"],
        }
    )
    assert found.templates == {"default": "plain", "tool_use": "with {{ tools | length }}"}
    assert found.chat_template == "plain"
    assert found.takes_tools
    assert found.chat([]) == "plain"
    assert found.chat([], tools=[{}, {}]) == "with 2"


def test_named_chat_templates_of_a_folder(tmp_path: Path) -> None:
    listed = [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]
    found = Tokenizer.from_folder(folder(tmp_path, chat_template=listed))
    assert found.chat_template == "r"  # the first, where none is called default
    assert found.chat([], tools=[{}]) == "t"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    found = Tokenizer.from_folder(folder(tmp_path, chat_template=listed))
    assert (found.chat([]), found.chat([], tools=[{}])) == ("file", "other")


# --- tokenizer.model ------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def piece(text: str, score: float, kind: int) -> bytes:
    score_field = varint(2 << 3 | 5) + struct.pack("<f", score)
    return message(1, message(1, text.encode()) + score_field + varint(3 << 3) + varint(kind))


def model_file(
    folder: Path, *, algorithm: int = 2, prefixed: int = 1, collapsed: int = 0, **config: Any
) -> Path:
    """A folder with the vocabulary of `sentencepiece` in a `tokenizer.model`."""
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "he", "ll"]
    data = b"".join(piece(t, 0.0, k) for t, k in (("<unk>", 2), ("<s>", 3), ("</s>", 3)))
    data += b"".join(piece(f"<0x{b:02X}>", 0.0, 6) for b in range(256))
    scores = [-100.0] * 5 + [-3.0, -2.0, -1.0, -4.0, -5.0, -6.0, -7.0]
    data += b"".join(piece(t, s, 1) for t, s in zip(words, scores, strict=True))
    data += message(2, varint(3 << 3) + varint(algorithm) + message(7, b"unused"))
    data += message(3, varint(3 << 3) + varint(prefixed) + varint(4 << 3) + varint(collapsed))
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_sentencepiece_file_alone(tmp_path: Path) -> None:
    theirs, ours = sentencepiece(), Tokenizer.from_folder(model_file(tmp_path))
    for text in ("hello", "helo  hö", "", " hello"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.bos_id == 1
    assert ours.eos_ids == {2}
    assert ours.named == {"bos_token": "<s>", "eos_token": "</s>"}


def test_options_of_a_sentencepiece_file(tmp_path: Path) -> None:
    tool = {"content": "<tool>", "special": True}
    config: dict[str, Any] = {
        "add_bos_token": False,
        "add_eos_token": True,
        "added_tokens_decoder": {"271": tool},
    }
    ours = Tokenizer.from_folder(model_file(tmp_path, prefixed=0, collapsed=1, **config))
    assert pieces(ours, "he  he<tool>") == ["he", " h", "e", "<tool>", "</s>"]
    config["added_tokens_decoder"] = {"300": tool}
    with pytest.raises(CorruptModel, match="'<tool>' has the id 300"):
        Tokenizer.from_folder(model_file(tmp_path, **config))


def test_damaged_sentencepiece_files(tmp_path: Path) -> None:
    path = model_file(tmp_path) / "tokenizer.model"
    data = path.read_bytes()
    for broken in (data[:-5], b"", b"\xff" * 40, data[:3]):
        path.write_bytes(broken)
        with pytest.raises(CorruptModel, match="SentencePiece model"):
            Tokenizer.from_folder(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"unigram.*tokenizer\.json"):
        Tokenizer.from_folder(model_file(tmp_path, algorithm=1))
