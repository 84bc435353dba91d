"""`Tokenizer`: text to ids and back, and the chat template, from a checkpoint or a GGUF file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.errors import CorruptModel, InvalidPrompt, UnsupportedModel
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
    chat_template: the model's own, if it has one; named: texts of special tokens
    (`bos_token`, `eos_token`, …) for the template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        mask_id: int | None = None,
        chat_template: str | None = None,
        named: Mapping[str, str] | None = None,
        prepend: Sequence[int] = (),
        append: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.mask_id = mask_id
        self.chat_template = chat_template
        self.named = dict(named or {})
        self._prepend, self._append = list(prepend), list(append)

    @property
    def vocab_size(self) -> int:
        """How many ids have a text; a model's table may be longer."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

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
        return text[1:] if self._bytes.marked_spaces and text.startswith(" ") else text

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

        Special tokens that are written out in messages or tools stay text.
        """
        if self.chat_template is None:
            raise InvalidPrompt("this model has no chat template; give it a plain prompt")
        from jinja2 import TemplateError

        marks = Placeholders(frozenset(str(self._added[i].content) for i in self._special))
        values = {**self.named, "tools": None, "documents": None, **marks.take(extra)}
        listed = marks.take(list(messages))
        try:
            text = self._template.render(
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

    @property
    def _template(self) -> Any:
        return _compile(self.chat_template or "")

    # --- sources ----------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From `tokenizer.json`, or vocabulary and merges, and the configuration beside them."""
        config = read_json(folder / "tokenizer_config.json")
        backend = _folder_backend(folder, config)
        special = read_json(folder / "special_tokens_map.json")
        named = {}
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
        if "eos_token" in named and (end := backend.token_to_id(named["eos_token"])) is not None:
            ends.add(end)
        bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        return cls(
            backend,
            bos_id=bos,
            eos_ids=ends,
            mask_id=_mask_id(backend, named.get("mask_token")),
            chat_template=_folder_template(folder, config),
            named=named,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the vocabulary, merges or scores, and kinds of tokens that a GGUF file holds."""
        from outstride.models.vocabulary import byte_level, mark_special, with_scores

        def get(key: str, default: Any = None) -> Any:
            return metadata.get(f"tokenizer.ggml.{key}", default)

        model, tokens = get("model"), get("tokens")
        if model is None or tokens is None:
            raise CorruptModel("the file has no vocabulary (tokenizer.ggml.model and .tokens)")
        kinds = get("token_type") or [1] * len(tokens)
        if len(kinds) != len(tokens):
            raise CorruptModel(f"{len(tokens)} tokens but {len(kinds)} kinds of tokens")
        pre = str(get("pre", "default"))
        if model == "gpt2":
            backend = byte_level({t: i for i, t in enumerate(tokens)}, get("merges") or [], pre)
        elif model == "llama":
            space = bool(get("add_space_prefix", True))
            backend = with_scores(tokens, get("scores") or [], kinds, space)
        else:
            raise UnsupportedModel(
                f"the tokenizer {model!r} is not supported; supported are gpt2 and llama"
            )
        mark_special(backend, tokens, kinds)
        bos, eos = get("bos_token_id"), get("eos_token_id")
        add_bos = bool(get("add_bos_token", model == "llama" or pre == "llama-bpe"))
        named = {}
        for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
            if (token := get(f"{key}_token_id")) is not None and token < len(tokens):
                named[name] = tokens[token]
        ends = (get(f"{key}_token_id") for key in ("eos", "eot", "eom"))
        template = metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            bos_id=bos,
            eos_ids=[end for end in ends if end is not None],
            chat_template=template,
            named=named,
            prepend=[bos] if add_bos and bos is not None else [],
            append=[eos] if get("add_eos_token", False) and eos is not None else [],
        )


class _TokenBytes:
    """The bytes of single tokens, in the way that a vocabulary writes them; known ones are kept."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = dict(backend.get_added_tokens_decoder())
        # The state of the decoder alone: writing out the whole vocabulary takes a tenth of a second.
        kinds = backend.decoder.__getstate__().decode() if backend.decoder else ""
        self._byte_level = '"ByteLevel"' in kinds
        self.marked_spaces = '"ByteFallback"' in kinds or '"Metaspace"' in kinds
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
        if self.marked_spaces:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            return text.replace("▁", " ").encode()
        return str(self._backend.decode([token])).encode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptModel(f"{path} is not a JSON object")
    return found


def _folder_backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers

    path, merges = folder / "tokenizer.json", folder / "merges.txt"
    if not path.is_file():
        if not merges.is_file() or not (folder / "vocab.json").is_file():
            raise UnsupportedModel(f"{folder} has no tokenizer.json, which is needed")
        from outstride.models.vocabulary import from_merges

        return from_merges(
            read_json(folder / "vocab.json"),
            merges.read_text(encoding="utf-8"),
            config,
            read_json(folder / "added_tokens.json"),
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise CorruptModel(f"{path} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


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


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    return template if isinstance(template, str) else None


@lru_cache(maxsize=8)  # kept here, because a tokenizer that holds it could not be pickled
def _compile(source: str) -> Any:
    """A chat template in a sandbox, with the helpers that templates expect."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Templates mark the assistant's part for training; here the mark means nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        options.setdefault("ensure_ascii", False)
        return json.dumps(value, **options)

    now: Callable[[str], str] = lambda pattern: datetime.now().strftime(pattern)  # noqa: E731
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise CorruptModel(f"the chat template cannot be read: {error}") from error
