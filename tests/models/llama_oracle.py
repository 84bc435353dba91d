"""llama.cpp as an oracle: its tokens and logits, computed in an environment of its own.

The environment is one that `make llama` built, one in the folder OUTSTRIDE_PEERS, or the current one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PACKAGE = "llama_cpp"


def python() -> str | None:
    """The Python that has llama-cpp-python; None if there is none."""
    from outstride.bench.peer_environments import ENVIRONMENTS

    for folder in filter(None, (os.environ.get("OUTSTRIDE_PEERS"), str(ENVIRONMENTS))):
        for found in sorted(Path(folder).glob("llama-*/bin/python")):
            return str(found)
    return sys.executable if importlib.util.find_spec(PACKAGE) else None


def tokenized(path: Path, texts: list[str]) -> list[list[int]]:
    """The ids of texts by the vocabulary of a GGUF file; no ids are put around them."""
    found: list[list[int]] = _run("tokenize", path, texts)
    return found


def logits(path: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits after each token, all in one batch with a KV cache in float32."""
    import numpy as np

    return np.array(_run("logits", path, tokens), dtype=np.float32)


def _run(task: str, path: Path, given: Any) -> Any:
    command = [str(python()), __file__, task, str(path)]
    told = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, timeout=120, check=False
    )
    if told.returncode:
        raise RuntimeError(f"llama.cpp cannot {task} {path}: {told.stderr[-2000:]}")
    return json.loads(told.stdout)


# --- in the environment of llama.cpp --------------------------------------------------------------


def _tokenize(lib: Any, path: str, texts: list[str]) -> list[list[int]]:
    options = lib.llama_model_default_params()
    options.vocab_only = True
    vocab = lib.llama_model_get_vocab(lib.llama_model_load_from_file(path.encode(), options))
    found = []
    for text in texts:
        data = text.encode()
        ids = (lib.llama_token * (len(data) + 8))()
        count = lib.llama_tokenize(vocab, data, len(data), ids, len(ids), False, False)
        found.append(list(ids[:count]))
    return found


def _logits(lib: Any, path: str, tokens: list[int]) -> list[list[float]]:
    options = lib.llama_model_default_params()
    options.use_mmap = True
    model = lib.llama_model_load_from_file(path.encode(), options)
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 0  # float32
    settings.flash_attn_type = 0
    context = lib.llama_init_from_model(model, settings)
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, True
    if lib.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    rows = [lib.llama_get_logits_ith(context, i) for i in range(len(tokens))]
    return [[float(x) for x in row[:size]] for row in rows]


def _main() -> None:
    import llama_cpp as lib  # type: ignore[import-not-found,unused-ignore]

    tasks: dict[str, Any] = {"tokenize": _tokenize, "logits": _logits}
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    task, path = sys.argv[1:3]
    json.dump(tasks[task](lib, path, json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    _main()
