"""`Tokenizer`: text to ids and back, and the chat template, from a checkpoint or a GGUF file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.errors import CorruptModel, InvalidPrompt, UnsupportedModel
from outstride.models.chat_template import (
    TOOL_USE,
    compile_template,
    default_template,
    folder_templates,
)
from outstride.models.chat_text import ChatText, Placeholders

if TYPE_CHECKING:
    import tokenizers

LONG = 4096
"""Characters from which on a text is encoded as a batch of one: other threads run on meanwhile."""


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, reversed."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """Built by `from_folder` or `from_gguf`.

    eos_ids: every id that ends a text; mask_id: the one that stands for a gap, if there is one;
    chat_template: the model's own, if it has one; templates: all of them by name; named: texts of
    special tokens (`bos_token`, `eos_token`, …) for the template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        mask_id: int | None = None,
        chat_template: str | None = None,
        templates: Mapping[str, str] | None = None,
        named: Mapping[str, str] | None = None,
        prepend: Sequence[int] = (),
        append: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.mask_id = mask_id
        self.templates = dict(templates or {})
        self.chat_template = chat_template or default_template(self.templates)
        self.named = dict(named or {})
        self._prepend, self._append = list(prepend), list(append)

    @property
    def vocab_size(self) -> int:
        """How many ids have a text; a model's table may be longer."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def takes_tools(self) -> bool:
        """Whether a chat template of the model writes tools into the prompt."""
        return TOOL_USE in self.templates or "tools" in (self.chat_template or "")

    @property
    def marked(self) -> bool:
        """Whether ids are put around a text that `to_json` does not tell of."""
        return bool(self._prepend or self._append)

    def to_json(self) -> str:
        """As a `tokenizer.json`."""
        return str(self._backend.to_str(pretty=True))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a text, with the ids that the model expects around it unless told otherwise.

        Special tokens that are written out in the text become their ids. In a prompt of `chat` only
        those of the template do; it must be encoded with `add_special=False`.
        """
        if isinstance(text, ChatText) and text.plain:
            if add_special:
                raise ValueError("encode a chat prompt with add_special=False")
            return [i for part, plain in text.sections() for i in self._ids(part, plain=plain)]
        ids = self._ids(text, add_special=add_special)
        return [*self._prepend, *ids, *self._append] if add_special else ids

    def _ids(self, text: str, *, add_special: bool = False, plain: bool = False) -> list[int]:
        backend = self._plain_backend if plain else self._backend
        if len(text) > LONG:
            return list(backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        return list(backend.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids; bytes that are no text become U+FFFD."""
        data = b"".join(
            self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i))
        )
        text = data.decode("utf-8", errors="replace")
        return text[1:] if self._bytes.prefixed and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id adds to a text; they may be a part of a character."""
        return self._bytes.of(token)

    def is_special(self, token: int) -> bool:
        """Whether an id marks structure and is no text."""
        return token in self._special

    def token_id(self, text: str) -> int | None:
        """The id of a token, such as `<|im_end|>`, if there is one."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether both mean the same by every id."""
        ours = self._backend.get_vocab(with_added_tokens=True)
        return bool(ours == other._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def digest(self) -> str:
        """Names the vocabulary: equal where every id means the same."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        listed = json.dumps(sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0])))
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> ChatText:
        """Messages in the model's own chat format. Encode the result with `add_special=False`.

        Special tokens that are written out in messages or tools stay text. A model with a template
        named `tool_use` gets it where there are tools.
        """
        source = self.chat_template
        if extra.get("tools"):
            source = self.templates.get(TOOL_USE, source)
        if source is None:
            raise InvalidPrompt("this model has no chat template; give it a plain prompt")
        from jinja2 import TemplateError

        marks = Placeholders(frozenset(str(self._added[i].content) for i in self._special))
        values = {**self.named, "tools": None, "documents": None, **marks.take(extra)}
        listed = marks.take(list(messages))
        try:
            text = compile_template(source).render(
                messages=listed, add_generation_prompt=add_generation_prompt, **values
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidPrompt(f"the chat template refused the messages: {error}") from error
        return marks.put_back(str(text))

    # --- inside -----------------------------------------------------------------------------------

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self._backend.get_added_tokens_decoder())

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def _bytes(self) -> _TokenBytes:
        return _TokenBytes(self._backend)

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A copy of the backend for which special tokens in a text are text."""
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    # --- sources ----------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From `tokenizer.json`, or vocabulary and merges, or `tokenizer.model`, and their configs."""
        config = read_json(folder / "tokenizer_config.json")
        backend, named = _folder_backend(folder, config)
        bare = bool(named)  # a `tokenizer.model` does not say which ids are put around a text
        special = read_json(folder / "special_tokens_map.json")
        for key in ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token"):
            value = config.get(key, special.get(key))
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[key] = text
        ends: set[int] = set()
        for source in ("generation_config.json", "config.json"):
            stated = read_json(folder / source).get("eos_token_id")
            if stated is not None:
                ends.update(stated if isinstance(stated, list) else [stated])
        bos, end = (
            backend.token_to_id(named[key]) if key in named else None
            for key in ("bos_token", "eos_token")
        )
        if end is not None:
            ends.add(end)
        return cls(
            backend,
            bos_id=bos,
            eos_ids=ends,
            mask_id=_mask_id(backend, named.get("mask_token")),
            templates=folder_templates(folder, config, read_json(folder / "chat_template.json")),
            named=named,
            prepend=[bos] if bos is not None and config.get("add_bos_token", True) and bare else [],
            append=[end] if end is not None and config.get("add_eos_token") and bare else [],
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the vocabulary, merges or scores, and kinds of tokens that a GGUF file holds."""
        from outstride.models.gguf_tokenizer import read_tokenizer

        return cls(**read_tokenizer(metadata))


class _TokenBytes:
    """The bytes of single tokens, in the way that a vocabulary writes them; known ones are kept."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = dict(backend.get_added_tokens_decoder())
        # The state of the decoder alone: writing out the whole vocabulary takes a tenth of a second.
        kinds = backend.decoder.__getstate__().decode() if backend.decoder else ""
        self._byte_level = '"ByteLevel"' in kinds
        self._marked_spaces = '"ByteFallback"' in kinds or '"Metaspace"' in kinds
        self.prefixed = self._marked_spaces and _strips_a_space(kinds)
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none if the vocabulary does not have it."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            table = _byte_of()
            return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
        if self._marked_spaces:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            return text.replace("▁", " ").encode()
        return str(self._backend.decode([token])).encode()


_MAX_JSON = 32 << 20
"""Bytes of the largest file of settings that is read."""


def _strips_a_space(decoder: str) -> bool:
    """Whether a decoder, as JSON, removes the space that encoding puts before a text."""
    return '"Strip"' in decoder or ('"Metaspace"' in decoder and '"never"' not in decoder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_JSON:
        raise CorruptModel(f"{path} has more than {_MAX_JSON:,} bytes, which no model needs")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptModel(f"{path} is not a JSON object")
    return found


def _folder_backend(
    folder: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend, and the special tokens that a `tokenizer.model` names."""
    import tokenizers

    path, merges = folder / "tokenizer.json", folder / "merges.txt"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise CorruptModel(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return backend, {}
    added = read_json(folder / "added_tokens.json")
    if merges.is_file() and (folder / "vocab.json").is_file():
        from outstride.models.vocabulary import from_merges

        vocab = read_json(folder / "vocab.json")
        return from_merges(vocab, merges.read_text(encoding="utf-8"), config, added), {}
    if (folder / "tokenizer.model").is_file():
        from outstride.models.sentencepiece_file import from_sentencepiece

        return from_sentencepiece(folder / "tokenizer.model", config, added)
    raise UnsupportedModel(
        f"{folder} has no tokenizer.json, vocab.json with merges.txt or tokenizer.model; one of them "
        "is needed"
    )


def _mask_id(backend: tokenizers.Tokenizer, named: str | None) -> int | None:
    """The mask by the name that the configuration gives it, or the one added token called a mask."""
    if named is not None:
        return backend.token_to_id(named)
    found = [
        token
        for token, added in backend.get_added_tokens_decoder().items()
        if "".join(filter(str.isalpha, added.content)).lower().endswith("mask")
    ]
    return found[0] if len(found) == 1 else None
