"""Settings of glibc's allocator without which a CPU measurement charges page faults to whoever stores most.

By default glibc gives every big block back to the system when it is freed, so each step faults its activations in anew:
storing everything then took 9.2 s a step instead of 3.1 s. glibc reads the settings once, when a process starts; hence
a command that measures starts itself again with them.
"""

from __future__ import annotations

import os
import platform
import sys

_THRESHOLD_BYTES = 4 * 2**30


def malloc_environment() -> dict[str, str]:
    """The environment variables that keep freed memory in the process; none where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return {}
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    return dict.fromkeys(names, str(_THRESHOLD_BYTES))


def reexec_with_malloc_settings() -> None:
    """Start this very command again with the settings, unless it has them already. Does not return if it does.

    The process keeps its id, terminal and signals. Values that a user chose are left alone.
    """
    missing = {name: value for name, value in malloc_environment().items() if name not in os.environ}
    if missing:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})  # noqa: S606
