"""Pre-tokenizers of byte-level BPE, by the name that GGUF files give them (`tokenizer.ggml.pre`).

Each is a list of patterns. A text is split by the first, each part of it by the second, and so on. The
patterns are those of the tokenizers that the models were published with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outstride.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split before pairs merge.

    whole_words: a part that is a token is taken as it is, whatever the merges say. add_bos: whether
    the model expects the BOS token where the file does not say so. normalized: whether the text is
    brought to the composed form (NFC) first. byte_level: whether tokens are written in the printable
    characters of byte-level BPE; otherwise in UTF-8, with `▁` for a space.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    normalized: bool = False
    byte_level: bool = True


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGIT, _UP_TO_THREE = r"\p{N}", r"\p{N}{1,3}"
_GPT4_ONE = rf"{_SUFFIX}|{_WORD}|{_DIGIT}|{_SYMBOLS}|{_SPACE}"
_GPT4_THREE = rf"{_SUFFIX}|{_WORD}|{_UP_TO_THREE}|{_SYMBOLS}|{_SPACE}"
_MARKED_WORDS = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)


def _cased(digits: str, suffix: str = "", symbols: str = r"[\r\n/]*", without: str = "") -> str:
    """Words end where capitals begin, as in o200k. without: what no word contains."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{symbols}|{_SPACE}"
    )


def _characters(ranges: str) -> str:
    """Ranges of code points in hexadecimal, as the inner part of a character class."""
    return "".join("-".join(rf"\x{{{end}}}" for end in each.split("-")) for each in ranges.split())


_ASCII_SYMBOL = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_MARKED = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_HAN_AND_KANA = rf"[{_characters('4e00-9fa5 3040-309f 30a0-30ff')}]+"
_HAN_AND_HANGUL = rf"[{_characters('4e00-9fa5 800-4e00 ac00-d7ff')}]+"
_DEEPSEEK_V3 = (
    _UP_TO_THREE,
    _HAN_AND_KANA,
    rf"{_ASCII_SYMBOL}[A-Za-z]+|{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
)
_DEEPSEEK_LETTERS = _characters(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 "
    "1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec "
    "1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 "
    "213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b "
    "a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f "
    "104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_DEEPSEEK_SYMBOLS = _characters("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_SPACED = rf" ?[^(\s|.,!?{_characters('2026 3002 ff0c 3001 964 6d4 60c')})]+"
_ASIAN = _characters(
    "4e00-9fff 3400-4dbf f900-faff 3040-309f 30a0-30ff ff65-ff9f 2f00-2fdf e40-e7f e80-eff 1780-17ff "
    "1000-109f aa60-aa7f a9e0-a9ff ac00-d7af 1100-11ff"
)
_YOUTU = "|".join(
    f"[{_characters(ranges)}]+"
    for ranges in (
        "ac00-d7a3 3131-318e",
        "ff01 2026 201c 201d 2018 2019 2014 ff1a ff1b ff0c 3001-303f fe30-fe4f",
        "3105-312f",
        "4e00-9fa5 3040-309f 30a0-30ff",
    )
)
_LONG_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8"))
_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

_KIMI = r"\p{Han}+|" + _cased(_UP_TO_THREE, f"{_SUFFIX}?", r"[\r\n]*", r"&&[^\p{Han}]")

_GPT2_SPLIT = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3 = PreTokenizer((_GPT4_THREE,), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((_GPT4_ONE,), normalized=True)
_O200K = PreTokenizer((_cased(_UP_TO_THREE, f"{_SUFFIX}?"),))
_BAILING = PreTokenizer(
    (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|{_DIGIT}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",)
)


def _same(split: PreTokenizer, names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), split)


PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **_same(
        _GPT2_SPLIT,
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe "
        "gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion granite-docling",
    ),
    **_same(PreTokenizer((_GPT2,), normalized=True), "mpt olmo"),
    **_same(_SINGLE_DIGITS, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    "command-r": PreTokenizer((_DIGIT, _GPT2), normalized=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **_same(
        _LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    **_same(PreTokenizer((_GPT4_THREE,)), "dbrx smaug-bpe chatglm-bpe"),
    **_same(PreTokenizer((_GPT4_THREE,), whole_words=True), "glm4 glm5"),
    "minicpm5": PreTokenizer(
        (_UP_TO_THREE, rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACE}"), whole_words=True
    ),
    "jais-2": PreTokenizer(
        (
            rf"{_SUFFIX}|{_WORD}|{_UP_TO_THREE}|{_SYMBOLS}|\s*[\r\n]+|{_LONG_SPACES}"
            r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    **_same(_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez"),
    **_same(PreTokenizer((_GPT4_ONE,)), "stablelm2 hunyuan solar-open grok-2"),
    "qwen35": PreTokenizer((_MARKED_WORDS,), normalized=True),
    "ufakzeka": PreTokenizer((rf"{_WORD}|{_DIGIT}|{_SYMBOLS}|{_SPACE}",)),
    "seed-coder": PreTokenizer(
        (rf"{_SUFFIX}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}",)
    ),
    **_same(_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    "exaone-moe": PreTokenizer(
        (
            rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _GPT4_ONE)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_SYMBOLS}]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGIT)
    ),
    **_same(PreTokenizer(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    "spark2_5": PreTokenizer(
        (
            _UP_TO_THREE,
            _HAN_AND_KANA,
            rf"{_ASCII_SYMBOL}[A-Za-z]+|{_MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            _DIGIT,
        )
    ),
    "afmoe": PreTokenizer((_FROM_THE_RIGHT, rf"[{_ASIAN}]+", _DEEPSEEK_V3[2])),
    "youtu": PreTokenizer((_YOUTU, _cased(_DIGIT, f"{_SUFFIX}?")), whole_words=True),
    **_same(PreTokenizer((_SPACED,)), "bloom poro-chat gpt3-finnish"),
    "viking": PreTokenizer((_SPACED, _DIGIT)),
    "tekken": PreTokenizer((_cased(_DIGIT),), whole_words=True, add_bos=True),
    **_same(_O200K, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    "granite-embed-multi-97m": PreTokenizer(_O200K.splits, whole_words=True),
    **_same(
        PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_O200K.splits)),
        "tiny_aya cohere2moe",
    ),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "superbpe": PreTokenizer((r"\p{N}+", r"\d{1,3}(?=(?:\d{3})*(?!\d))")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    **_same(
        PreTokenizer((r"[^\n]+|[\n]+",), add_bos=True, byte_level=False),
        "gemma4 granite-embed-multi-311m",
    ),
    "sarvam-moe": PreTokenizer((r"[^\n]+|[\n]+",), byte_level=False),
}  # fmt: skip
"""Pre-tokenizers by name."""


def pre_tokenizer(name: str, known: Iterable[str] = ()) -> PreTokenizer:
    """The pre-tokenizer of a name; an error that lists all names if there is none."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"the pre-tokenizer {name!r} is not supported; "
            f"supported are {', '.join(sorted(known or PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
