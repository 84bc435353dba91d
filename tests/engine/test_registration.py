"""Models and draft heads that are registered while requests run, from other threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outstride import LLM, SamplingParams
from outstride.core.contracts import AttentionPattern, MaskedSpec
from outstride.models.load import Loaded
from outstride.models.toy import Toy
from tests.bench.fake import ALPHABET, FakeTokenizer

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
MODELS = 300
BLOCKS = MaskedSpec(len(ALPHABET), block=4, shifted=False, causal=True)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Lets Python switch threads as often as it can, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def toy(name: str, **options: Any) -> Loaded:
    model: Any = Toy(vocab_size=len(ALPHABET), pages=64, habit=6.0, **options)
    tokenizer: Any = FakeTokenizer()
    return Loaded(model=model, tokenizer=tokenizer, name=name, context=512, path=Path(name))


@pytest.mark.usefixtures("eager_switches")
def test_models_are_added_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thread walks over the registered models whenever a request begins."""
    small = toy("small", accent=1)
    monkeypatch.setattr("outstride.llm.attachments.load", lambda name, **_: small)
    target = toy("toy", attention_pattern=AttentionPattern(4), masking=BLOCKS)
    with LLM(target, max_sequences=8) as llm:
        expected = llm.generate("hello", PARAMS, method="plain")[0].token_ids
        stop, failed = threading.Event(), list[BaseException]()

        def add(thread: int) -> None:
            for number in range(MODELS):
                try:
                    llm.method(f"draft:model=small-{thread}-{number}")
                except Exception as error:
                    failed.append(error)
            stop.set()

        threads = [threading.Thread(target=add, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        while not stop.is_set():
            for result in llm.generate(["hello"] * 16, PARAMS, method="plain"):
                if result.error is not None:
                    failed.append(result.error)
                else:
                    assert result.token_ids == expected
        for thread in threads:
            thread.join()
        assert failed == []
        assert len(llm.engine.models) == 3 * MODELS + 1
        drafted = llm.generate("hello", PARAMS, method="draft:model=small-1-7")[0]
        assert drafted.token_ids == expected
        llm.engine.check_integrity()
