"""Properties of this machine."""

import os


def machine_memory() -> int:
    """Return the physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
