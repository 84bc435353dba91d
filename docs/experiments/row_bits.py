"""Does torch on this CPU give a row the same bits whatever stands beside it?

    .venv/bin/python docs/experiments/row_bits.py

Prints, for each operation, the settings under which the bits of one and the same row fall into
different classes. Takes well under a minute on two cores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

SHAPES = ((576, 576), (576, 1536), (1536, 576), (576, 49152), (1024, 3072), (2048, 2048))
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 32, 40, 48, 64, 96, 128)
TILE = 16
KEYS = 64


def classes(results: dict[int, torch.Tensor]) -> str:
    """Settings grouped by identical bits, as text."""
    groups: list[tuple[torch.Tensor, list[int]]] = []
    for setting, bits in results.items():
        for known, members in groups:
            if torch.equal(known, bits):
                members.append(setting)
                break
        else:
            groups.append((bits, [setting]))
    return " | ".join(" ".join(map(str, members)) for _, members in groups)


def linear_by_rows(k: int, n: int) -> str:
    """Row 0 of products by number of rows: which counts agree with each other."""
    torch.manual_seed(k * n)
    x, w = torch.randn(max(COUNTS), k), torch.randn(n, k)
    return classes({rows: F.linear(x[:rows], w)[0] for rows in COUNTS})


def tiles(k: int, n: int) -> int:
    """A row in tiles of 16: any place, any neighbours, one tile or many. Counts differing results."""
    torch.manual_seed(k + n)
    row, w = torch.randn(k), torch.randn(n, k).t()
    expected = torch.mm(torch.cat([row[None], torch.zeros(TILE - 1, k)]), w)[0]
    different = 0
    for trial in range(32):
        neighbours = torch.randn(TILE, k) * 10.0 ** (trial % 5 - 2)
        place = int(torch.randint(TILE, ()))
        neighbours[place] = row
        different += not torch.equal(torch.mm(neighbours, w)[place], expected)
    return different


def bmm_by_count() -> str:
    """One pair of a batched product of fixed shapes: which batch counts agree."""
    torch.manual_seed(0)
    q, k = torch.randn(300, 32, KEYS), torch.randn(300, KEYS, KEYS)
    counts = (1, 2, 3, 5, 8, 13, 64, 256, 300)
    return classes({count: torch.bmm(q[:count], k[:count].transpose(1, 2))[0] for count in counts})


def by_place(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Values at every place of buffers of many lengths: how many get other bits somewhere."""
    torch.manual_seed(0)
    values = torch.rand(512) * 8 + 1e-3
    if function in (torch.sigmoid, F.silu):
        values = values * torch.where(torch.rand(512) < 0.5, -1.0, 1.0)
    expected = function(values.repeat_interleave(64).contiguous())[::64]
    different = torch.zeros(512, dtype=torch.bool)
    for length in (1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65):
        rows = values[:, None].expand(512, length)
        for i, row in enumerate(rows):
            different[i] |= bool((function(row.contiguous()) != expected[i]).any())
    return int(different.sum())


def main() -> None:
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}", end=", ")
    print(f"MKL {torch.backends.mkl.is_available()}, {torch.get_num_threads()} threads")
    print("\nlinear: row counts that give row 0 the same bits (classes divided by |)")
    for k, n in SHAPES:
        print(f"  {k} x {n}: {linear_by_rows(k, n)}")
    print("\nproducts of exactly 16 rows: results that depend on place or neighbours, of 32")
    for k, n in SHAPES:
        print(f"  {k} x {n}: {tiles(k, n)}")
    print(f"\nbmm of 32 x 64 by 64 x 64: batch counts that agree\n  {bmm_by_count()}")
    print("\nelementwise: values whose bits depend on their place, of 512")
    for function in (
        torch.exp,
        torch.sin,
        torch.cos,
        torch.log,
        torch.rsqrt,
        torch.sigmoid,
        F.silu,
    ):
        print(f"  {function.__name__}: {by_place(function)}")


if __name__ == "__main__":
    main()
