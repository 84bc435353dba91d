"""LoRA adapters in `LLM`: loaded by name, chosen per request, dropped again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from outstride import LLM, SamplingParams
from outstride.errors import InvalidParams, UnknownAdapter, UnsupportedModel
from outstride.models.load import load
from tests.models.lora_files import linear_shapes, write_lora
from tests.serve import tiny

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = "a text of more than one page, so that its prefix is found again in the cache"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model and two adapters for it."""
    top = tmp_path_factory.mktemp("adapters")
    base = tiny.make(top / "base")
    shapes = linear_shapes(load(str(base), weights="fp32", pages=8).model.config)
    for seed, name in enumerate(("french", "legal")):
        write_lora(top / name, shapes, seed=seed)
    return {name: str(top / name) for name in ("base", "french", "legal")}


@pytest.fixture
def llm(folders: dict[str, str]) -> Iterator[LLM]:
    adapters = {name: folders[name] for name in ("french", "legal")}
    with LLM(folders["base"], adapters=adapters, pages=128, weights="fp32") as found:
        yield found


def test_each_request_has_its_adapter(llm: LLM, folders: dict[str, str]) -> None:
    params = [replace(PARAMS, adapter=name) for name in ("", "french", "legal", "french")]
    together = [result.text for result in llm.generate([PROMPT] * 4, params, method="auto")]
    assert together[1] == together[3]
    assert len(set(together)) == 3
    alone = [llm.generate(PROMPT, its)[0] for its in params]
    assert [result.text for result in alone] == together
    with LLM(folders["base"], pages=128, weights="fp32") as plain:
        assert plain.generate(PROMPT, PARAMS)[0].text == together[0]
        assert plain.fingerprint == llm.fingerprint
    assert len({llm.fingerprint_of(name) for name in ("", "french", "legal")}) == 3


def test_prefixes_are_reused_under_the_same_adapter_only(llm: LLM) -> None:
    for name in ("", "french", "legal"):
        first, again = (llm.generate(PROMPT, replace(PARAMS, adapter=name))[0] for _ in range(2))
        assert first.stats.reused == 0
        assert again.stats.reused > 0
        assert again.text == first.text


def test_an_unknown_adapter_names_the_known_ones(llm: LLM) -> None:
    with pytest.raises(UnknownAdapter, match=r"no adapter 'german'; loaded are french, legal"):
        llm.generate(PROMPT, replace(PARAMS, adapter="german"))
    with pytest.raises(UnknownAdapter, match="loaded are french, legal"):
        llm.unload_adapter("german")
    with pytest.raises(InvalidParams, match="needs a name"):
        llm.load_adapter("", "somewhere")


def test_an_adapter_under_an_old_name_is_another_one(llm: LLM, folders: dict[str, str]) -> None:
    """The prefix cache goes by the weights of an adapter, not by its name."""
    french, legal = (
        llm.generate(PROMPT, replace(PARAMS, adapter=name))[0].text for name in ("french", "legal")
    )
    llm.unload_adapter("french")
    with pytest.raises(UnknownAdapter):
        llm.generate(PROMPT, replace(PARAMS, adapter="french"))
    llm.load_adapter("french", folders["legal"])
    [result] = llm.generate(PROMPT, replace(PARAMS, adapter="french"))
    assert result.text == legal != french
    assert result.stats.reused > 0, "it is the adapter that was called legal"


def test_a_backend_without_adapters_refuses_before_reading(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    monkeypatch.setattr(llm.model.ops.draft_heads, "unsupported_adapter", lambda: "use a CPU")
    with pytest.raises(UnsupportedModel, match="cannot run LoRA adapters: use a CPU"):
        llm.load_adapter("another", "nowhere")
