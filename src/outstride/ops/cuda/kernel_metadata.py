"""The fields of `metadata` as Triton constants: HEADER_REPLY, ITEM_LIMIT, SAMPLING_TOP_K, ...

Kernels import them by name. Triton then makes their values part of a kernel's cache key, which it
would not do for attributes of a module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.ops.cuda import metadata

_TABLES = {
    "HEADER": metadata.HeaderField,
    "ROW": metadata.RowField,
    "ITEM": metadata.ItemField,
    "SAMPLING": metadata.SamplingField,
}
_SIZES = (
    "HEADER_SIZE", "ITEM_SIZE", "SAMPLING_SIZE", "SAME_LIMIT", "PREVIOUS_TOKEN", "MAX_HEAD_ROWS",
    "MAX_CANDIDATES",
)  # fmt: skip

globals().update(
    {
        f"{prefix}_{field.name}": tl.constexpr(int(field))
        for prefix, table in _TABLES.items()
        for field in table
    }
)
globals().update({name: tl.constexpr(int(getattr(metadata, name))) for name in _SIZES})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
