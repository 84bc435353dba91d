"""`LLMBase`: what `LLM` and `AsyncLLM` share: a model, its tokenizer, an engine, and requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from outstride import registry
from outstride.core.contracts import Grammar, Method
from outstride.core.infill import parse
from outstride.core.params import SamplingParams
from outstride.core.prefix_key import fingerprint_of
from outstride.core.proposal import TARGET
from outstride.core.structured_output import OutputFormat
from outstride.engine.engine import Engine
from outstride.engine.engine_thread import EngineThread, OutputEvent, RequestHandle
from outstride.engine.scheduler import Limits
from outstride.engine.stopping import TokenToBytes
from outstride.errors import InvalidParams, InvalidPrompt, OutstrideError, RequestError
from outstride.llm.attachments import AUTO, SHIPPED, Attachments
from outstride.llm.gc_freeze import freeze_imports
from outstride.llm.pending import PendingRequest
from outstride.models.fetch import cache_dir
from outstride.models.load import Loaded, load
from outstride.policy.policy import DraftPolicy
from outstride.results import Filled, Result

if TYPE_CHECKING:
    from outstride.grammar.matcher import GrammarCompiler

FormatLike: TypeAlias = OutputFormat | Mapping[str, Any]
"""An `OutputFormat`, or a JSON schema."""
Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Seq[int] | Seq[Message]
"""Raw text, token ids, or the messages of a conversation."""


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt rather than a list of them."""
    if isinstance(prompts, str) or _is_messages(prompts):
        return True
    return bool(len(prompts)) and all(isinstance(t, int) for t in prompts)


def _ignore(event: OutputEvent) -> None:
    """The callback of a request that is not submitted yet."""
    del event


def _spread(what: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{len(value)} values of {what} for {count} prompts")
    return list(value)


def raise_single_error(results: list[Result]) -> list[Result]:
    """The results; raises the error of a request that was the only one."""
    if len(results) == 1 and results[0].error is not None:
        raise results[0].error
    return results


class LLMBase:
    """A model, its tokenizer and an engine with its thread."""

    def __init__(
        self,
        model: str | Path | Loaded = "smollm2",
        *,
        pages: int | None = None,
        max_nodes: int = 256,
        max_sequences: int = 64,
        device: str = "auto",
        weights: str = "auto",
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """adapter: the folder of a diffusion adapter, or `shipped`. It enables masked methods.

        adapters: folders of LoRA adapters by name. A request chooses one with
        `SamplingParams(adapter=name)`; without it, the model itself answers.
        trust_remote_code: whether transformers may run Python code of the model's repository.
        """
        if not isinstance(model, Loaded):
            freeze_imports()
            model = load(
                str(model),
                pages=pages,
                device=device,
                weights=weights,
                trust_remote_code=trust_remote_code,
            )
        loaded = model
        if max_nodes < 1 or max_sequences < 1:
            raise InvalidParams("max_nodes and max_sequences must be at least 1")
        self.name = loaded.name
        self.device, self.weights = loaded.device, loaded.weights
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(
            {TARGET: loaded.model},
            limits=Limits(nodes=max_nodes, sequences=max_sequences),
            end_tokens=self.tokenizer.eos_ids,
            token_to_bytes=self._token_to_bytes,
            policy=DraftPolicy(folder=cache_dir() / "cost-curves"),
        )
        if self.device == "cpu":
            # Maps the first KV pages of each layer. Otherwise the first pass would wait for it.
            self.model.move(*np.zeros((2, 1), dtype=np.int64))
        self.engine_thread = EngineThread(self.engine)
        """The one thread that steps the engine. It starts with the first request."""
        self._attachments = Attachments(
            self.engine_thread, loaded, pages=pages, device=self.device, weights=weights
        )
        self._methods: dict[str, Method] = {}
        self._building = threading.RLock()
        self._compiler: GrammarCompiler | None = None
        registry.discover()
        if self.device == "cpu" and self._autoregressive:
            self._attachments.preload()
        if adapter is not None:
            self.adapt(adapter)
        for name, folder in (adapters or {}).items():
            self.load_adapter(name, folder)

    def adapt(self, adapter: str | Path = SHIPPED) -> None:
        """Attaches a diffusion adapter by its folder; `shipped` is the one of the package."""
        self._attachments.diffusion_adapter(adapter)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Loads a LoRA adapter in PEFT's format, which requests choose by its name."""
        self._attachments.lora(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Drops a LoRA adapter. Raises RequestError while requests use it."""
        self._attachments.detach_lora(name)

    def _token_to_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to an answer; a special token adds none."""
        return b"" if self.tokenizer.is_special(token) else self.tokenizer.token_bytes(token)

    def detokenizer(self, params: SamplingParams) -> TokenToBytes | None:
        """How the output of a request becomes text, where special tokens stay in it; else None."""
        if params.skip_special_tokens and not params.visible_tokens:
            return None
        raw, shown = self.tokenizer.token_bytes, frozenset(params.visible_tokens)
        if not params.skip_special_tokens:
            return raw
        return lambda token: raw(token) if token in shown else self._token_to_bytes(token)

    @property
    def fingerprint(self) -> str:
        """Names weights, operations and build. With the same one, a request has the same text."""
        return self.model.fingerprint

    def fingerprint_of(self, adapter: str) -> str:
        """The fingerprint of requests with this LoRA adapter; empty: without one."""
        return fingerprint_of(self.model, adapter)

    @property
    def default_method(self) -> str:
        """The method of requests that name none: the simplest one that the model supports."""
        return "plain" if self.model.attention_pattern.block is None else "steps"

    def method(self, spec: str | Method | None = None) -> Method:
        """A method by its spec, with the models that it needs loaded. It is built once."""
        if isinstance(spec, Method):
            return spec
        spec = spec or self.default_method
        with self._building:
            if spec not in self._methods:
                self._methods[spec] = self.build(spec)
            return self._methods[spec]

    def prepare(self, spec: str | Method | None = None) -> None:
        """Loads what a method needs; otherwise its first request does, and waits for it.

        Requests that run meanwhile wait between two passes.
        """
        method = self.method(spec)
        self.engine_thread.call(lambda: self.engine.warm_up(method))
        with suppress(InvalidPrompt):  # there is no chat template
            self.encode("?", chat=True)  # the first chat compiles it

    def build(self, spec: str) -> Method:
        """A new method by its spec. `auto` is the default method on models that only fill in masks."""
        entry, options = registry.parse(spec)
        if entry.name == AUTO and not self._autoregressive:
            return registry.build(self.default_method)
        given = {}
        if "model" in {option.name for option in entry.options}:
            given["model"] = self._attachments.draft_model(str(options["model"]))
        if "from" in {option.name for option in entry.options}:
            needed = any(need.startswith(("trained ", "draft head")) for need in entry.needs)
            kinds, named = entry.drafter.head_kinds(options), str(options.get("from", ""))
            owner = given["model"] if entry.drafter.head_on_draft_model else TARGET
            given["from"] = self._attachments.draft_head(
                *kinds, name=named, needed=needed, owner=owner
            )
        return registry.build(spec, **given)

    @property
    def _autoregressive(self) -> bool:
        """Whether the model can be decoded autoregressively."""
        spec = self.model.masked_spec
        return self.model.attention_pattern.block is None or (spec is not None and spec.causal)

    def shaped(
        self, method: Method, shape: FormatLike | None, params: SamplingParams
    ) -> tuple[Method, Grammar | None]:
        """The method and the grammar for structured output of this shape."""
        if shape is None:
            return method, None
        from outstride.grammar.guided import guided
        from outstride.grammar.matcher import GrammarCompiler

        if not isinstance(shape, OutputFormat):
            shape = OutputFormat.schema(shape)
        with self._building:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.tokenizer, self.model.vocab_size)
        matcher = self._compiler.compile(shape, params.max_tokens)
        return guided(method, matcher), matcher

    def encode(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """The token ids of a prompt: raw text, or a conversation with the chat template.

        Special tokens that are written out in raw text become their ids; in chat messages they stay
        text.
        """
        if isinstance(prompt, str):
            if chat:
                prompt = [{"role": "user", "content": prompt}]
            else:
                return self.tokenizer.encode(prompt)
        if _is_messages(prompt):
            text = self.tokenizer.chat([m for m in prompt if isinstance(m, Mapping)])
            return self.tokenizer.encode(text, add_special=False)
        listed = list(prompt) if isinstance(prompt, Iterable) else [None]
        tokens = [t for t in listed if isinstance(t, int) and not isinstance(t, bool)]
        if len(tokens) != len(listed):
            raise InvalidPrompt("a prompt is text, token ids, or messages with role and content")
        return tokens

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: str | Method | None,
        shape: FormatLike | None = None,
        *,
        chat: bool = False,
        trace: bool = False,
        salt: str = "",
        streaming: bool = False,
        canvas: bool = False,
    ) -> PendingRequest:
        """A request that is ready to be submitted."""
        tokens, params = self.encode(prompt, chat=chat), params or SamplingParams()
        built, grammar = self.shaped(self.method(method), shape, params)
        handle = RequestHandle(
            tokens, params, built, _ignore, salt, streaming, stream_canvas=canvas, grammar=grammar
        )
        handle.token_to_bytes = self.detokenizer(params)
        return PendingRequest(handle, trace)

    def _requests(
        self, prompts: Any, params: Any, method: Any, shape: Any, **options: Any
    ) -> list[PendingRequest | OutstrideError]:
        """One request for each prompt, or the error of a request that is wrong."""
        listed = [prompts] if _is_single(prompts) else list(prompts)
        count = len(listed)
        spread = zip(
            listed,
            _spread("params", params, count),
            _spread("method", method, count),
            _spread("shape", shape, count),
            strict=True,
        )
        found: list[PendingRequest | OutstrideError] = []
        for arguments in spread:
            try:
                found.append(self._request(*arguments, **options))
            except OutstrideError as error:
                found.append(error)
        return found

    def _infill_request(
        self,
        text: str,
        params: SamplingParams | None,
        method: str | Method | None,
        *,
        trace: bool,
        salt: str,
    ) -> PendingRequest:
        """An infilling request. The gaps determine how long the answer is."""
        encode = self.tokenizer.encode
        template = parse(text, lambda piece, first: encode(piece, add_special=first))
        size = template.length - len(template.prompt)
        params = replace(
            params or SamplingParams(), max_tokens=size, min_tokens=size, ignore_eos=True
        )
        pending = self._request(template.prompt, params, method, trace=trace, salt=salt)
        pending.handle.fixed, pending.template = template.fixed, template
        return pending

    def _filled(self, pending: PendingRequest) -> list[Filled]:
        """The results of an infilling request; raises its error."""
        if pending.error is not None:
            raise pending.error
        template, decode = pending.template, self.tokenizer.decode
        assert template is not None
        found = []
        for output in pending.result().outputs:
            tokens = [*template.prompt, *output.token_ids]
            spans = [decode([tokens[p] for p in span]) for span in template.spans]
            found.append(Filled(decode(tokens), spans, output))
        return found

    def close(self) -> None:
        """Ends the engine; running requests are cancelled."""
        self.engine_thread.close()
