"""What Python's garbage collector need not look at again and again."""

from __future__ import annotations

import gc
from functools import cache


@cache
def spare_imports() -> None:
    """Takes what imports have made out of the collector's sight, once in the life of a process.

    Torch alone makes more than a hundred thousand objects, all there to stay; going through them takes
    longer than many steps, and a full collection may come in the middle of an answer. The collector
    itself stays as it was: whatever is made from now on, the model among it, is its business as ever.
    What the caller made before this is frozen too, so it is called before the first model is loaded,
    and what is already garbage is collected first.
    """
    # All that a model brings with it is imported now rather than while it is loaded.
    from outstride.models import decoder  # noqa: F401

    gc.collect()
    gc.freeze()
