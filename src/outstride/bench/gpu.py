"""Passes and generation on an NVIDIA GPU, against fixed bounds and against transformers.

A pass is timed twice: on the GPU (between two events, with everything launched before the first
event is reached) and by the host. The large model has the shape of Llama 3 8B and random weights;
the cost of its passes does not depend on the values.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from outstride.bench.comparison_rows import Bound, PeerReport, Row
from outstride.core.contracts import PassInput
from outstride.core.graph import chain, tree
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import BlockTable
from outstride.errors import OutstrideError

if TYPE_CHECKING:
    from outstride.models.decoder import Decoder
    from outstride.models.load import Loaded

CACHED, LARGE_CACHED, PROMPT, OUTPUT, CONCURRENCY = 512, 1024, 4096, 128, 64


def load_on_gpu(name: str, *, pages: int | None = None) -> Loaded:
    """Loads a model and its tokenizer on the GPU."""
    from outstride.models import load
    from outstride.models.decoder import Decoder
    from outstride.ops.cuda import available

    if not available():
        raise OutstrideError("no NVIDIA GPU was found, or Triton is not installed")
    from outstride.ops.cuda import Cuda

    path = load.locate(name)
    read = load._from_folder if path.is_dir() else load._from_gguf
    config, open_model, tokenizer = read(path)
    if pages is None:
        pages = max(CONCURRENCY * 1024, 2 * config.context) // load.PAGE_SIZE
    model = Decoder.from_tensors(
        config, open_model().read(), pages=pages, page_size=load.PAGE_SIZE, make_ops=Cuda
    )
    return load.Loaded(model, tokenizer, name, min(config.context, pages * load.PAGE_SIZE), path)


def large() -> Decoder:
    """A decoder of the shape of Llama 3 8B with random weights, created on the GPU."""
    import torch

    from outstride.models.config import DecoderConfig, RopeConfig
    from outstride.models.decoder import Decoder
    from outstride.ops.cuda import Cuda
    from outstride.ops.weights import LayerWeights, ModelWeights

    config = DecoderConfig(
        architecture="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        layers=32, heads=32, kv_heads=8, head_dim=128, context=8192, norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0), rope_layers=(True,) * 32, windows=(None,) * 32,
    )  # fmt: skip

    def weight(outer: int, inner: int) -> torch.Tensor:
        made = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16)
        return made.mul_(inner**-0.5)

    def norm() -> torch.Tensor:
        return torch.ones(4096, device="cuda")

    def layer() -> LayerWeights:
        return LayerWeights(
            norm(), weight(6144, 4096), None, None, None, weight(4096, 4096), None,
            norm(), weight(28672, 4096), None, weight(4096, 14336), None,
        )  # fmt: skip

    pages = 512
    model = ModelWeights(
        shape=config, embedding=weight(128256, 4096), layers=[layer() for _ in range(32)],
        norm=norm(), head=weight(128256, 4096), slots=pages * 16, page_size=16,
    )  # fmt: skip
    return Decoder(config, Cuda(model), "random", pages=pages, page_size=16)


class GpuPasses:
    """Single passes of one model, without an engine."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._random = np.random.default_rng(0)

    def tokens(self, count: int) -> list[int]:
        return [int(t) for t in self._random.integers(self.model.vocab_size, size=count)]

    def work(self, table: BlockTable, nodes: int, last: bool = False) -> PassInput:
        """A chain after the KV of a table; all nodes are scored, or only the last."""
        entries = np.arange(len(table), len(table) + nodes)
        slots = np.asarray(table.pages, dtype=np.int64)[entries // 16] * 16 + entries % 16
        wants = Wants(nodes=(nodes - 1,)) if last else Wants()
        graph = chain(self.tokens(nodes), len(table))
        return PassInput(Proposal(graph, given=1, wants=wants), table, slots)

    def drafted(self, table: BlockTable, nodes: int) -> PassInput:
        """A draft tree after the KV of a table, with the top 8 candidates of each node wanted."""
        work = self.work(table, nodes)
        parents = [-1, *(i // 2 for i in range(nodes - 1))]
        graph = tree(self.tokens(nodes), parents, len(table))
        return PassInput(Proposal(graph, given=1, wants=Wants(best=8)), table, work.slots)

    def steps(self, table: BlockTable, count: int) -> list[float]:
        """Seconds of consecutive decode steps; the table has pages for them."""
        found, token = [], 1
        for _ in range(count):
            work = self.work(table, 1)
            start = time.perf_counter()
            work.proposal.graph.tokens[0] = token
            token = int(self.model.forward([work]).wait()[0].best[0, 0])
            found.append(time.perf_counter() - start)
            table.positions.append(len(table))
        return found

    def filled(self, first_page: int, cached: int, extra: int) -> BlockTable:
        """A table with real KV, and pages for more."""
        pages = list(range(first_page, first_page + (cached + extra) // 16 + 1))
        table = BlockTable(pages=pages)
        self.model.forward([self.work(table, cached, last=True)]).wait()
        table.positions = list(range(cached))
        return table

    def gpu_seconds(self, work: Sequence[PassInput], repeat: int = 50) -> list[float]:
        """Seconds between events; a sleep kernel before the first lets the host launch everything
        ahead.
        """
        import torch

        found, nap = [], cast("Callable[[int], None]", torch.cuda._sleep)
        for _ in range(repeat + 4):
            nap(6_000_000)
            first, last = _events()
            first.record()
            under_way = self.model.forward(work)
            last.record()
            under_way.wait()
            last.synchronize()
            found.append(first.elapsed_time(last) / 1e3)
        return found[4:]

    def host_seconds(self, work: Sequence[PassInput], repeat: int = 50) -> list[float]:
        return timed(lambda: self.model.forward(work).wait(), repeat)


def timed(call: Callable[[], object], repeat: int, warmups: int = 4) -> list[float]:
    found = []
    for _ in range(repeat + warmups):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found[warmups:]


def _events() -> tuple[Any, Any]:
    import torch

    make = cast("Callable[..., Any]", torch.cuda.Event)
    return make(enable_timing=True), make(enable_timing=True)


def ceilings() -> tuple[float, float]:
    """Bytes per second of a copy (read plus written), and operations per second of a matrix product."""
    import torch

    def seconds(call: Callable[[], object], count: int = 10) -> float:
        for _ in range(3):
            call()
        first, last = _events()
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count

    def copied() -> float:
        source = torch.randn(1 << 29, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source))

    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copied(), 2 * 8192**3 / seconds(lambda: square @ square)


def _row(name: str, seconds: list[float], bound: Bound | None = None, over: float = 1.0) -> Row:
    value = median(seconds) / over
    unit = "ms" if over == 1.0 else "x"
    scale = 1e3 if over == 1.0 else 1.0
    return Row(name, unit, value * scale, None, bound, raw={"ours": seconds})


def passes(loaded: Loaded) -> list[Row]:
    """Passes over one node and over 64 nodes, after cached KV."""
    bench = GpuPasses(loaded.model)
    table = bench.filled(0, CACHED, 128)
    one, many = bench.work(table, 1), bench.work(table, 64)
    alone = bench.gpu_seconds([one])
    together = bench.gpu_seconds([many])
    drafted = bench.drafted(table, 16)
    step = median(bench.steps(bench.filled(48, CACHED, 128), 100)[20:])
    tables = [bench.filled(48 * (i + 1), CACHED, 16) for i in range(CONCURRENCY)]
    batch = [bench.work(t, 1) for t in tables]
    at_most = Bound(0.60, of="value")
    return [
        _row(f"pass over 1 node, {CACHED} cached, on the GPU", alone, at_most),
        _row("the same by the host", bench.host_seconds([one])),
        _row(
            "pass over 64 nodes, relative to 1 node",
            together,
            Bound(1.25, of="value"),
            median(alone),
        ),
        _row("pass over 64 nodes by the host", bench.host_seconds([many])),
        _row("tree of 16 nodes, top 8 of each, on the GPU", bench.gpu_seconds([drafted])),
        _row(
            "the same by the host, as a share of a step", bench.host_seconds([drafted]), over=step
        ),
        _row(f"{CONCURRENCY} sequences of 1 node, on the GPU", bench.gpu_seconds(batch)),
        _row(f"{CONCURRENCY} sequences of 1 node by the host", bench.host_seconds(batch)),
    ]


def generation(loaded: Loaded) -> list[Row]:
    """Tokens per second under `plain`, against transformers where it is installed."""
    from outstride.llm import LLM

    theirs = transformers(loaded)
    bench, rows = GpuPasses(loaded.model), []
    tables = [bench.filled(8 * i, OUTPUT // 2, 16) for i in range(CONCURRENCY)]
    batch = [bench.work(table, 1) for table in tables]
    gpu_step = {count: median(bench.gpu_seconds(batch[:count])) for count in (1, CONCURRENCY)}
    with LLM(loaded, max_sequences=CONCURRENCY) as llm:
        prompts = [f"Write a short story about number {i}." for i in range(CONCURRENCY)]

        def times(count: int, tokens: int, **options: Any) -> list[float]:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, **options)
            return timed(lambda: llm.generate(prompts[:count], params), 7, warmups=2)

        for name, count, key, limit in (
            ("one request", 1, "alone", 0.15),
            (f"{CONCURRENCY} requests", CONCURRENCY, "batch", 1.0),
        ):
            found, first = times(count, OUTPUT), times(count, 1)
            ours = count * OUTPUT / median(found)
            title = f"greedy, {name}, plain"
            raw = {"ours": found, "first token": first}
            rows.append(generation_row(title, ours, theirs.get(key), raw))
            step = (median(found) - median(first)) / (OUTPUT - 1)
            alone = max(step - gpu_step[count], 0.0) * 1e3
            title = f"host work per step that no pass hides, {name}"
            rows.append(Row(title, "ms", alone, None, Bound(limit, of="value")))
        found = times(1, OUTPUT, temperature=0.8, top_p=0.95, seed=1)
        ours = OUTPUT / median(found)
        rows.append(Row("sampled (0.8, top-p 0.95), one request", "tok/s", ours))
    return rows


def generation_row(
    name: str, ours: float, theirs: float | None, raw: dict[str, list[float]]
) -> Row:
    """Tokens per second against transformers; `theirs` is None where it is not installed."""
    other = "transformers" if theirs is not None else "transformers (not installed)"
    return Row(name, "tok/s", ours, theirs, Bound(25, at_most=False), other, raw)


def transformers(loaded: Loaded) -> dict[str, float]:
    """Tokens per second of its `generate`, alone and with a batch; empty where it is not installed."""
    import importlib

    try:
        library = importlib.import_module("transformers")
        importlib.import_module("gguf")
    except ImportError:
        return {}
    import torch

    path, source = loaded.path, {}
    if path.is_file():
        path, source = path.parent, {"gguf_file": loaded.path.name}
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **source)
    model = model.to("cuda").eval()
    found = {}
    for key, count, steps in (("alone", 1, 64), ("batch", CONCURRENCY, 64)):
        ids = torch.randint(100, 40000, (count, 16), device="cuda")
        options = {"do_sample": False, "min_new_tokens": steps, "max_new_tokens": steps}
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, **options)
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, attention_mask=mask, **options)
        torch.cuda.synchronize()
        found[key] = count * steps / (time.perf_counter() - start)
    del model
    torch.cuda.empty_cache()
    return found


def large_passes() -> list[Row]:
    """The large shape: one node, 64 nodes, and a prompt."""
    import torch

    copied, multiplied = ceilings()
    model = large()
    bench = GpuPasses(model)
    config = model.config
    matrices = config.hidden_size * (
        (config.heads + 2 * config.kv_heads + config.heads) * config.head_dim
        + 3 * config.intermediate_size
    )
    read = 2 * (config.layers * matrices + config.vocab_size * config.hidden_size) / copied
    table = bench.filled(0, LARGE_CACHED, 128)
    alone = bench.gpu_seconds([bench.work(table, 1)], 20)
    together = bench.gpu_seconds([bench.work(table, 64)], 20)
    prompt = bench.work(BlockTable(pages=list(range(100, 100 + PROMPT // 16))), PROMPT, last=True)
    prefill = bench.gpu_seconds([prompt], 3)
    attention = 2 * PROMPT * PROMPT * config.heads * config.head_dim * config.layers
    work = 2 * PROMPT * config.layers * matrices + attention
    share = work / median(prefill) / multiplied
    model.close()
    del model, bench
    torch.cuda.empty_cache()
    name = f"8B shape, 1 node, {LARGE_CACHED} cached"
    return [
        Row("copy", "TB/s", copied / 1e12),
        Row("bf16 products", "TFLOP/s", multiplied / 1e12),
        _row(name, alone),
        _row(f"{name}, relative to reading its weights", alone, Bound(1.25, of="value"), read),
        _row("8B shape, 64 nodes", together),
        _row(
            "8B shape, 64 nodes, relative to 1 node",
            together,
            Bound(1.2, of="value"),
            median(alone),
        ),
        _share(share, prefill),
    ]


def _share(share: float, seconds: list[float]) -> Row:
    bound = Bound(0.4, at_most=False, of="value")
    name = f"8B shape, prompt of {PROMPT}"
    return Row(name, "share of the bf16 rate", share, None, bound, raw={"ours": seconds})


def starts(name: str) -> list[Row]:
    """Seconds from process start to the first token, of the second start."""
    command = [sys.executable, "-m", "outstride.bench.gpu", name]
    found = []
    for _ in range(2):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
        found.append(time.perf_counter() - start)
    bound = Bound(8.0, of="value")
    return [Row("second start to first token", "s", found[1], None, bound, raw={"ours": found})]


def compare(
    name: str, report: PeerReport, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """All rows of the GPU table."""
    loaded = load_on_gpu(name)
    measurements: list[Callable[[], list[Row]]] = [
        lambda: passes(loaded),
        lambda: generation(loaded),
        large_passes,
        lambda: starts(name),
    ]
    for i, measured in enumerate(measurements):
        report.rows += measured()
        if progress is not None:
            progress(i + 1, len(measurements))


def _first_token(name: str) -> None:
    from outstride.llm import LLM

    with LLM(load_on_gpu(name), max_sequences=4) as llm:
        print(llm.generate(["Why is the sky blue?"], SamplingParams(max_tokens=1))[0].text)


if __name__ == "__main__":
    _first_token(sys.argv[1])
