"""Files of random weights: both the format and the arithmetic are those of real files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from outstride.bench import random_model
from outstride.bench.random_model import RandomModelShape
from outstride.errors import InvalidParams
from outstride.models.gguf_file import GgufFile
from outstride.models.load import load

SHAPE = RandomModelShape(64, 2, 2, 1, 96, context=128)
WORDS = ["a", "b", "ab", *(f"x{i}" for i in range(61))]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A GGUF file with a tokenizer and nothing else."""
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * len(WORDS))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_file_loads_and_its_weights_have_the_right_size(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    count = random_model.write(path, SHAPE, source)
    file = GgufFile(path)
    assert count == sum(int(np.prod(info.shape)) for info in file.tensors.values())
    assert {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")} == {
        k: v for k, v in GgufFile(source).metadata.items() if k.startswith("tokenizer.")
    }
    for name, std in (("blk.1.ffn_down.weight", 96**-0.5), ("token_embd.weight", 0.05)):
        values = file.tensor(name).floats(slice(None))
        assert float(values.std()) == pytest.approx(std, rel=0.15)
        assert abs(float(values.mean())) < 0.1 * std
    loaded = load(str(path), device="cpu", weights="fp32", pages=8)
    assert (loaded.model.vocab_size, loaded.context) == (len(WORDS), 128)
    assert loaded.tokenizer.encode("ab") == [2]


def test_a_seed_gives_the_same_file(source: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.gguf" for i in range(3)]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        random_model.write(file, SHAPE, source, seed)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other


def test_the_command(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(random_model.SHAPES, "1b", SHAPE)
    out = tmp_path / "out.gguf"
    random_model.main(["--out", str(out), "--tokenizer", str(source), "--parameters", "1b"])
    assert out.is_file()
    assert "billion weights" in capsys.readouterr().out


def test_shapes_are_whole_blocks(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match="multiples of 32"):
        random_model.write(tmp_path / "x.gguf", RandomModelShape(60, 1, 2, 1, 96), source)


def test_a_mixture_of_experts(source: Path, tmp_path: Path) -> None:
    shape = RandomModelShape(64, 1, 2, 1, 96, experts=5, used=2, head_dim=64)
    path = tmp_path / "mixture.gguf"
    count = random_model.write(path, shape, source)
    file = GgufFile(path)
    assert count == sum(int(np.prod(info.shape)) for info in file.tensors.values())
    assert tuple(file.tensors["blk.0.ffn_down_exps.weight"].shape) == (5, 64, 96)
    assert tuple(file.tensors["blk.0.attn_output.weight"].shape) == (64, 128)
    assert file.metadata["qwen3moe.expert_used_count"] == 2


def test_thirty_billion() -> None:
    listed = random_model.tensors(random_model.SHAPES["30b-a3b"], 151936)
    assert sum(int(np.prod(tensor.shape)) for tensor in listed) == pytest.approx(30.2e9, rel=0.01)


def test_one_billion() -> None:
    listed = random_model.tensors(random_model.SHAPES["1b"], 49152)
    assert sum(int(np.prod(tensor.shape)) for tensor in listed) == pytest.approx(1.07e9, rel=0.01)
