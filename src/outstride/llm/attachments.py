"""`Attachments`: draft models, draft heads and adapters that are loaded when a method needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outstride import registry
from outstride.core.proposal import TARGET
from outstride.engine.admission import unknown_adapter
from outstride.engine.engine_thread import EngineThread
from outstride.errors import (
    InvalidParams,
    ModelNotFound,
    RequestError,
    UnsupportedModel,
    VocabularyMismatch,
)
from outstride.models.load import Loaded, load

AUTO = "auto"
ADAPTER, SHIPPED = "diffusion-adapter", "shipped"
"""The recipe that trains adapters, and the name of the one that comes with the package."""


class Attachments:
    """Loads what methods name and registers it with the engine. Safe on any thread.

    Files are read in the caller's thread. A registered model changes between two passes only, on the
    engine's thread: a pass may be reading the same weights.
    """

    def __init__(
        self, thread: EngineThread, target: Loaded, *, pages: int | None, device: str, weights: str
    ) -> None:
        self._thread = thread
        self._engine = thread.engine
        self._target = target
        self._pages, self._device, self._weights = pages, device, weights
        self._loading = threading.RLock()
        self._read: dict[str, Callable[[str], None]] = {}
        """Draft heads of the target that are read and not attached, by the folder's path."""

    def lora(self, name: str, folder: str | Path) -> None:
        """Attaches a LoRA adapter in PEFT's format, which requests choose by its name."""
        from outstride.models import lora

        if not name or name != name.strip():
            raise InvalidParams(f"an adapter needs a name, not {name!r}")
        ops = self._target.model.ops
        if reason := ops.draft_heads.unsupported_adapter():
            raise UnsupportedModel(f"{ops.name} cannot run LoRA adapters: {reason}")
        found = lora.read(Path(folder).expanduser(), self._target.model.config)

        def attach(model: Any) -> None:
            model.attach_adapter(name, found.digest, found.layers)

        with self._loading:
            self._thread.call(lambda: self._engine.update_model(TARGET, attach))

    def detach_lora(self, name: str) -> None:
        """Drops a LoRA adapter; raises if there is none of this name, or if requests use it."""

        def detach(model: Any) -> None:
            if name not in model.adapters:
                raise unknown_adapter(name, model.adapters)
            if any(sequence.params.adapter == name for sequence in self._engine.unfinished):
                raise RequestError(f"requests with adapter {name!r} run; try again after them")
            model.detach_adapter(name)

        with self._loading:
            self._thread.call(lambda: self._engine.update_model(TARGET, detach))

    def diffusion_adapter(self, adapter: str | Path) -> None:
        """Attaches a diffusion adapter by its folder; `shipped` is the one of the package."""
        if self._target.model.masked_spec is not None:
            raise UnsupportedModel(
                f"{self._target.name} fills in masks already and takes no adapter"
            )
        named = "" if str(adapter) == SHIPPED else str(adapter)
        self.draft_head(ADAPTER, name=named, needed=True)

    def draft_model(self, name: str) -> str:
        """Loads a draft model, once; returns the name under which the engine has it."""
        key = f"draft {name}"
        with self._loading:
            if key not in self._engine.models:
                loaded = load(name, pages=self._pages, device=self._device, weights=self._weights)
                tokenizer = self._target.tokenizer
                if not tokenizer.same_vocabulary(loaded.tokenizer):
                    raise VocabularyMismatch(
                        f"{name} cannot draft for {self._target.name}: their vocabularies differ "
                        f"({loaded.tokenizer.vocab_size} and {tokenizer.vocab_size} tokens)"
                    )
                self._engine.add_model(key, loaded.model)
        return key

    def draft_head(
        self, kind: str, *others: str, name: str, needed: bool, owner: str = TARGET
    ) -> str:
        """Attaches a draft head, filter or adapter, once; returns the name that the model has for it.

        kind, others: the training recipes whose heads the method can use; the first is the default.
        name: its folder; empty for the one of the package; `none` for none.
        needed: whether it is an error that the package has none. Otherwise the result is empty.
        owner: the model that it belongs to.
        """
        folder = self._folder(kind, name)
        if folder is None:
            if needed and name != "none" and not self._has_masks(kind, name):
                user = "self-diffuse" if kind == ADAPTER else kind
                raise ModelNotFound(
                    f"no draft head is shipped for {self._target.name}: make one with `outstride "
                    f"train {kind}`, and name its folder, as in {user}:from=FOLDER"
                )
            return ""
        key = str(folder.resolve())
        model: Any = self._engine.model(owner)
        with self._loading:
            if key not in model.draft_heads and key not in model.filters:
                self._attach(owner, key, folder)
        if (made := (model.draft_heads.get(key) or model.filters[key]).kind) not in (kind, *others):
            raise UnsupportedModel(
                f"{folder} was made by the recipe {made!r}, for the method {made!r}; "
                f"this method needs one of {' or '.join(map(repr, (kind, *others)))}"
            )
        return key

    def preload(self) -> None:
        """Reads the draft head that `auto` uses with this model, if there is one, and converts it.

        Otherwise the first answer would wait for it. `auto` attaches it when it needs it; until then it
        costs memory, but no time in a pass.
        """
        from outstride.models import draft_heads

        entry, options = registry.parse(AUTO)
        folder = self._folder(entry.drafter.head_kinds(options)[0], "")
        if folder is not None:
            model, vocabulary = self._target.model, self._target.tokenizer.digest
            self._read[str(folder.resolve())] = draft_heads.read(model, folder, vocabulary)

    def _has_masks(self, kind: str, name: str) -> bool:
        """Whether the target fills in masks by itself, so that it needs no adapter."""
        return kind == ADAPTER and not name and self._target.model.masked_spec is not None

    def _folder(self, kind: str, name: str) -> Path | None:
        from outstride.models import draft_heads

        if name == "none" or self._has_masks(kind, name):
            return None
        if name:
            return Path(name).expanduser()
        config = getattr(self._target.model, "config", None)
        if config is None:
            return None
        return draft_heads.shipped(config, self._target.tokenizer.digest, kind)

    def _attach(self, owner: str, key: str, folder: Path) -> None:
        from outstride.models import draft_heads

        attach = self._read.pop(key, None) if owner == TARGET else None
        if attach is None:
            model: Any = self._engine.model(owner)
            attach = draft_heads.read(model, folder, self._target.tokenizer.digest)

        def update(model: Any) -> None:
            attach(key)
            if owner != TARGET:  # methods look all filters up in the target
                self._target.model.filters[key] = model.filters[key]

        self._thread.call(lambda: self._engine.update_model(owner, update))
