"""Tries an installed wheel: every module is imported, and the default model answers a prompt.

`make wheel` copies this file out of the source tree and runs it there, in an environment of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import outstride
from outstride import LLM, SamplingParams
from outstride.bench.prompts import built_in
from outstride.core import host_library
from outstride.models import draft_heads
from outstride.models.load import aliases
from outstride.ops.cpu import native
from outstride.serve.settings import PAGE

OPTIONAL = {"triton", "llama_cpp", "transformers", "openvino_genai", "vllm", "playwright"}


def import_all() -> int:
    """Imports every module; those that need an optional package may be left out."""
    count = 0
    for module in pkgutil.walk_packages(outstride.__path__, "outstride."):
        if module.name.endswith(("__main__", "._kernels")):  # _kernels is a library for ctypes
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OPTIONAL:
                raise
        count += 1
    return count


def main(source: Path) -> None:
    folder = Path(outstride.__file__).parent
    assert not folder.is_relative_to(source), f"{folder} is the source tree, not the wheel"
    kernels, host = native.library_path(), host_library.library()
    assert kernels is not None, "the wheel has no native kernels: is there a compiler?"
    assert kernels.is_relative_to(folder)
    assert host is not None, "the wheel has no native host functions: is there a compiler?"
    assert (PAGE / "index.html").is_file()
    assert built_in()
    assert "parallel-block" in aliases()
    print(f"{import_all()} modules imported from {folder}")
    with LLM() as llm:
        assert draft_heads.shipped(llm.model.config, llm.tokenizer.digest, "block-drafter")
        [answer] = llm.chat("Count from one to five.", SamplingParams(max_tokens=12))
        assert answer.text.strip()
        print(f"{llm.model.ops.name}: {answer.text!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
