"""How much memory of the host is free."""

from __future__ import annotations

import os
from pathlib import Path


def available() -> int:
    """Bytes that can be allocated without swapping: `MemAvailable`, or else half of all memory."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
