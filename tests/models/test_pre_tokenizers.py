"""Splits of pre-tokenizers, and llama.cpp's vocabularies with the ids that it expects.

OUTSTRIDE_VOCABULARIES names the folder `models` of llama.cpp's source, with its `ggml-vocab-*.gguf`.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from outstride.models.gguf_file import GgufFile
from outstride.models.pre_tokenizers import PRE_TOKENIZERS
from outstride.models.tokenizer import Tokenizer

FOLDER = Path(os.environ.get("OUTSTRIDE_VOCABULARIES", "nowhere"))
VOCABULARIES = sorted(
    path for path in FOLDER.glob("ggml-vocab-*.gguf") if path.with_name(f"{path.name}.inp").exists()
)
TEXT = "I'm HERE, fooBar's 12345 x\n\n  中文か a/b/\n"
SPLITS = {
    "gpt-2": "I|'m| HERE|,| fooBar|'s| 12345| x|\n\n | 中文か| a|/|b|/|\n",
    "smollm": "I|'m| HERE|,| fooBar|'s| |1|2|3|4|5| x|\n\n | 中文か| a|/|b|/|\n",
    "falcon": "I|'|m| HERE|,| fooBar|'|s| |123|45| x|\n\n | 中文か| a|/|b|/|\n",
    "llama-bpe": "I|'m| HERE|,| fooBar|'s| |123|45| x|\n\n| | 中文か| a|/b|/\n",
    "qwen2": "I|'m| HERE|,| fooBar|'s| |1|2|3|4|5| x|\n\n| | 中文か| a|/b|/\n",
    "tekken": "I|'m| HERE|,| foo|Bar|'s| |1|2|3|4|5| x|\n\n| | 中文か| a|/b|/\n",
    "gpt-4o": "I'm| HERE|,| foo|Bar's| |123|45| x|\n\n| | 中文か| a|/b|/\n",
    "kimi-k2": "I'm| HERE|,| foo|Bar's| |123|45| x|\n\n| | |中文|か| a|/b|/\n",
    "deepseek-v3": "I|'m| HERE|,| fooBar|'s| |123|45| x|\n\n|  |中文か| a|/b|/\n",
    "deepseek-coder": "I|'|m| HERE|,| fooBar|'|s| |1|2|3|4|5| x|\n|\n| | |中文か| a|/|b|/|\n",
    "deepseek-llm": "I|'|m| HERE|,| fooBar|'|s| |12345| x|\n|\n|  |中文か| a|/|b|/|\n",
    "bloom": "I'm| HERE|,| fooBar's| 12345| x|\n\n | 中文か| a/b/|\n",
    "viking": "I'm| HERE|,| fooBar's| |1|2|3|4|5| x|\n\n | 中文か| a/b/|\n",
    "seed-coder": "I|'m| HERE|,| fooBar|'s| |1|2|3|4|5| x|\n\n| | 中文か| a|/b|/|\n",
    "afmoe": "I|'m| HERE|,| fooBar|'s| |12|345| x|\n\n|  |中文か| a|/b|/\n",
}


def split(name: str, text: str) -> list[str]:
    cuts = [Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].splits]
    return [part for part, _ in Sequence(cuts).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", SPLITS)
def test_splits(name: str) -> None:
    assert split(name, TEXT) == SPLITS[name].split("|")


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pattern_keeps_the_text(name: str) -> None:
    text = TEXT + " ½ ١٢٣ 1234567 \u00e9\u0301 👩‍👩‍👧 ไทย हिन्दी … <=> $1,000.00\r\n\t~"
    assert "".join(split(name, text)) == text


def test_marks_belong_to_words() -> None:
    assert split("qwen35", "a\u0301b") == ["a\u0301b"]
    assert split("qwen2", "a\u0301b") == ["a", "\u0301b"]


@pytest.mark.skipif(not VOCABULARIES, reason="OUTSTRIDE_VOCABULARIES names no folder with them")
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_ids_that_llama_cpp_expects(path: Path) -> None:
    metadata = GgufFile(path).metadata
    if metadata["tokenizer.ggml.model"] == "bert":
        pytest.skip("a vocabulary of encoders")
    tokenizer = Tokenizer.from_gguf(metadata)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode()
    expected = path.with_name(f"{path.name}.out").read_text().split("\n")
    for text, line in zip(texts.split("\n__ggml_vocab_test__\n"), expected, strict=False):
        if unicodedata.normalize("NFC", text) != text:
            continue  # llama.cpp does not normalize; transformers does
        ids = tokenizer.encode(text, add_special=False)
        assert ids == [int(number) for number in line.split()], text
        assert tokenizer.decode(ids, skip_special=False) == text
