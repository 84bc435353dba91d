"""What both surfaces share: a model, its tokenizer, an engine, and requests on their way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from outstride import registry
from outstride.core.contracts import Grammar, Method
from outstride.core.holes import Holes, parse
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence
from outstride.core.shape import Shape
from outstride.engine.engine import Engine
from outstride.engine.runner import Event, Runner, Ticket
from outstride.engine.scheduler import Limits
from outstride.errors import (
    InvalidParams,
    InvalidPrompt,
    ModelNotFound,
    OutstrideError,
    RequestError,
    UnsupportedModel,
    VocabularyMismatch,
)
from outstride.llm.garbage import spare_imports
from outstride.models.load import Loaded, load
from outstride.results import Chunk, Completion, Filled, Result, completion_of, prompt_logprobs_of

if TYPE_CHECKING:
    from outstride.grammar.guide import Guides

AUTO = "auto"
ADAPTER, SHIPPED = "diffusion-adapter", "shipped"
"""The recipe that makes adapters, and the name of the one that comes with the package."""
Shaped: TypeAlias = Shape | Mapping[str, Any]
"""A shape, or a JSON schema."""
Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Seq[int] | Seq[Message]
"""Raw text, token ids, or the messages of a conversation."""


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt rather than a list of them."""
    if isinstance(prompts, str) or _is_messages(prompts):
        return True
    return bool(len(prompts)) and all(isinstance(t, int) for t in prompts)


def _nobody(event: Event) -> None:
    """Where the events of a request go before somebody listens."""
    del event


@dataclass(eq=False, slots=True)
class Asked:
    """A request under way: its events become chunks and a result."""

    ticket: Ticket
    trace: bool
    holes: Holes | None = None
    done: bool = False
    started: float = field(default_factory=time.perf_counter)
    texts: dict[int, str] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Completion] = field(default_factory=dict)
    leader: Sequence | None = None
    error: Exception | None = None

    def take(self, event: Event) -> Chunk | None:
        """What an event adds; nothing if it only says how things ended."""
        self.done = event.done
        if event.error is not None:
            self.error = event.error
        if event.progress is None:
            return None
        sequence, now = event.progress.sequence, time.perf_counter()
        index = sequence.index
        if index == 0:
            self.leader = sequence
        if sequence.error is not None:
            self.error = sequence.error
        self.texts[index] = self.texts.get(index, "") + event.progress.text
        trace = None
        if self.trace:
            done = self.seen.get(index, 0)
            trace = sequence.trace[done:]
            self.seen[index] = done + len(trace)
        chunk = Chunk(event.progress.text, event.progress.tokens, index, trace)
        if sequence.painted:
            start = sequence.prompt_length
            chunk.canvas = {p - start: token for p, token in event.progress.canvas.items()}
        if event.progress.finished:
            chunk.completion = self.outputs[index] = completion_of(
                sequence,
                self.texts[index],
                now - self.started,
                (sequence.spoke or now) - self.started,
                trace=self.trace,
            )
        return chunk

    def piece(self, event: Event) -> Chunk | None:
        """The same for a stream: raises what went wrong, and passes on what there is to show."""
        chunk = self.take(event)
        if self.error is not None:
            raise self.error
        return chunk if chunk is not None and (self.ticket.painted or chunk) else None

    def result(self) -> Result:
        """Everything that was said."""
        return Result(
            prompt_token_ids=self.ticket.tokens,
            outputs=[self.outputs[i] for i in sorted(self.outputs)],
            prompt_logprobs=prompt_logprobs_of(self.leader) if self.leader else None,
            error=self.error,
        )


class Base:
    """A model, its tokenizer and an engine; what both surfaces share."""

    def __init__(
        self,
        model: str | Path | Loaded = "smollm2",
        *,
        pages: int | None = None,
        max_nodes: int = 256,
        max_sequences: int = 64,
        weights: str = "auto",
        adapter: str | Path | None = None,
    ) -> None:
        """adapter: the folder of a diffusion adapter, or `shipped`: masked methods work then, too."""
        self._pages, self._weights = pages, weights
        if not isinstance(model, Loaded):
            spare_imports()
            model = load(str(model), pages=pages, weights=weights)
        loaded = model
        if max_nodes < 1 or max_sequences < 1:
            raise InvalidParams("max_nodes and max_sequences must be at least 1")
        self.name = loaded.name
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(
            {TARGET: loaded.model},
            limits=Limits(nodes=max_nodes, sequences=max_sequences),
            end_tokens=self.tokenizer.eos_ids,
            spell=self._spell,
        )
        self._runner = Runner(self.engine)
        self._methods: dict[str, Method] = {}
        self._guides: Guides | None = None
        registry.discover()
        if adapter is not None:
            self.adapt(adapter)

    def adapt(self, adapter: str | Path = SHIPPED) -> None:
        """Attaches a diffusion adapter by its folder; `shipped` is the one of the package."""
        if self.model.masking is not None:
            raise UnsupportedModel(f"{self.name} fills in masks already and takes no adapter")
        named = "" if str(adapter) == SHIPPED else str(adapter)
        self._graft(ADAPTER, named, needed=True)

    def _spell(self, token: int) -> bytes:
        """What a token adds to an answer: marks of structure add nothing."""
        return b"" if self.tokenizer.is_special(token) else self.tokenizer.token_bytes(token)

    @property
    def fingerprint(self) -> str:
        """Names what the promise covers: weights, operations and build."""
        return self.model.fingerprint

    @property
    def default_method(self) -> str:
        """What requests get that name no method: the plainest that the model can be decoded with."""
        return "plain" if self.model.vision.block is None else "steps"

    def method(self, spec: str | Method | None = None) -> Method:
        """A method as written, with the models that it needs loaded; built once."""
        if isinstance(spec, Method):
            return spec
        spec = spec or self.default_method
        if spec not in self._methods:
            self._methods[spec] = self.build(spec)
        return self._methods[spec]

    def prepare(self, spec: str | Method | None = None) -> None:
        """Loads what a method needs and measures what passes cost; else its first request waits for it.

        Others that run wait between two passes.
        """
        method, done = self.method(spec), Future[None]()

        def measured() -> None:
            try:
                self.engine.roster.prepare(method)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._runner.ask(measured)
        done.result()

    def build(self, spec: str) -> Method:
        """A new method as written. `auto` is the default where the model only fills in masks."""
        entry, options = registry.parse(spec)
        if entry.name == AUTO and not self._continues:
            return registry.build(self.default_method)
        given = {}
        if "model" in {option.name for option in entry.options}:
            given["model"] = self._draft_model(str(options["model"]))
        if "from" in {option.name for option in entry.options}:
            needed = "trained part" in entry.needs
            kind, named = entry.drafter.part, str(options.get("from", ""))
            owner = given["model"] if entry.drafter.part_of_draft else TARGET
            given["from"] = self._graft(kind, named, needed=needed, owner=owner)
        return registry.build(spec, **given)

    @property
    def _continues(self) -> bool:
        """Whether the model can be decoded autoregressively."""
        masking = self.model.masking
        return self.model.vision.block is None or (masking is not None and masking.causal)

    def shaped(
        self, method: Method, shape: Shaped | None, params: SamplingParams
    ) -> tuple[Method, Grammar | None]:
        """A method, and a grammar beside it, for answers of this shape."""
        if shape is None:
            return method, None
        from outstride.grammar.guide import Guides
        from outstride.grammar.guided import guided

        if not isinstance(shape, Shape):
            shape = Shape.schema(shape)
        if self._guides is None:
            self._guides = Guides(self.tokenizer, self.model.vocab_size)
        guide = self._guides.compile(shape, params.max_tokens)
        return guided(method, guide), guide

    def _draft_model(self, name: str) -> str:
        key = f"draft {name}"
        if key not in self.engine.passes.models:
            loaded = load(name, pages=self._pages, weights=self._weights)
            if not self.tokenizer.same_vocabulary(loaded.tokenizer):
                raise VocabularyMismatch(
                    f"{name} cannot draft for {self.name}: their vocabularies differ "
                    f"({loaded.tokenizer.vocab_size} and {self.tokenizer.vocab_size} tokens)"
                )
            self.engine.passes.add(key, loaded.model)
        return key

    def _graft(self, kind: str, name: str, *, needed: bool, owner: str = TARGET) -> str:
        """A trained part by the name of its folder, attached; by default the one that is shipped.

        owner: the model that it belongs to.
        """
        from outstride.models import grafts

        if name == "none" or (kind == ADAPTER and not name and self.model.masking is not None):
            return ""
        folder, config = (
            Path(name).expanduser() if name else None,
            getattr(self.model, "config", None),
        )
        if folder is None and config is not None:
            folder = grafts.shipped(config, self.tokenizer.digest, kind)
        if folder is None:
            if needed:
                user = "self-diffuse" if kind == ADAPTER else kind
                raise ModelNotFound(
                    f"no trained part is shipped for {self.name}: make one with `outstride train "
                    f"{kind}`, and name its folder, as in {user}:from=FOLDER"
                )
            return ""
        key = str(folder.resolve())
        model: Any = self.engine.passes.models[owner]
        if key not in model.grafts and key not in model.filters:
            grafts.attach(model, key, folder, self.tokenizer.digest)
            self.engine.passes.adapted(owner)
        if owner != TARGET:  # methods find all judges in one place
            self.model.filters[key] = model.filters[key]
        if (made := (model.grafts.get(key) or model.filters[key]).kind) != kind:
            raise UnsupportedModel(
                f"{folder} holds a part of the recipe {made!r}, which the method {made!r} drafts with; "
                f"what is wanted here is one of {kind!r}"
            )
        return key

    def encode(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """The token ids of a prompt: text as it stands, a conversation by the chat template."""
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

    def _ask(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: str | Method | None,
        shape: Shaped | None = None,
        *,
        chat: bool = False,
        trace: bool = False,
        salt: str = "",
        watched: bool = False,
        canvas: bool = False,
    ) -> Asked:
        """A request that is ready to be handed in."""
        tokens, params = self.encode(prompt, chat=chat), params or SamplingParams()
        built, grammar = self.shaped(self.method(method), shape, params)
        ticket = Ticket(tokens, params, built, _nobody, salt, watched, painted=canvas)
        ticket.grammar = grammar
        return Asked(ticket, trace)

    def _ask_all(
        self, prompts: Any, params: Any, method: Any, shape: Any, **how: Any
    ) -> list[Asked | OutstrideError]:
        """One request for each prompt; what is wrong with one says so in its place."""
        found: list[Asked | OutstrideError] = []
        for request in self._requests(prompts, params, method, shape):
            try:
                found.append(self._ask(*request, **how))
            except OutstrideError as error:
                found.append(error)
        return found

    def _ask_filling(
        self,
        text: str,
        params: SamplingParams | None,
        method: str | Method | None,
        *,
        trace: bool,
        salt: str,
    ) -> Asked:
        """A request for what stands in holes: they say how long the answer is."""
        encode = self.tokenizer.encode
        holes = parse(text, lambda piece, first: encode(piece, add_special=first))
        size = holes.length - len(holes.prompt)
        params = replace(
            params or SamplingParams(), max_tokens=size, min_tokens=size, ignore_eos=True
        )
        asked = self._ask(holes.prompt, params, method, trace=trace, salt=salt)
        asked.ticket.fixed, asked.holes = holes.fixed, holes
        return asked

    def _filled(self, asked: Asked) -> list[Filled]:
        if asked.error is not None:
            raise asked.error
        holes, decode = asked.holes, self.tokenizer.decode
        assert holes is not None
        found = []
        for output in asked.result().outputs:
            tokens = [*holes.prompt, *output.token_ids]
            spans = [decode([tokens[p] for p in span]) for span in holes.spans]
            found.append(Filled(decode(tokens), spans, output))
        return found

    @staticmethod
    def _alone(results: list[Result]) -> list[Result]:
        """A request that was the only one raises what went wrong with it."""
        if len(results) == 1 and results[0].error is not None:
            raise results[0].error
        return results

    @staticmethod
    def _spread(what: str, value: Any, count: int) -> list[Any]:
        """One value for all prompts, or one for each."""
        if not isinstance(value, list | tuple):
            return [value] * count
        if len(value) != count:
            raise RequestError(f"{len(value)} values of {what} for {count} prompts")
        return list(value)

    def _requests(
        self, prompts: Any, params: Any, method: Any, shape: Any
    ) -> list[tuple[Any, Any, Any, Any]]:
        listed = [prompts] if _is_one(prompts) else list(prompts)
        return list(
            zip(
                listed,
                self._spread("params", params, len(listed)),
                self._spread("method", method, len(listed)),
                self._spread("shape", shape, len(listed)),
                strict=True,
            )
        )

    def close(self) -> None:
        """Ends the engine; what runs is cancelled."""
        self._runner.close()
