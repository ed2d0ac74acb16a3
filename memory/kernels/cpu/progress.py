"""Says which kernel is being compiled while somebody waits: a line on a terminal, or plain text in a notebook."""

from __future__ import annotations

import logging
import sys

_LOG = logging.getLogger("hybridmem.memory")
_WHY = "compiling CPU kernels for this machine, once"

_has_told = False


def tell(kernel: str) -> None:
    """Say that a kernel is being compiled. On a terminal this replaces the line before."""
    global _has_told
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{_WHY}: {kernel} …")
        sys.stderr.flush()
    elif not _has_told:
        if _is_notebook():
            # This goes to stdout, because a notebook shows stderr in red, like an error.
            sys.stdout.write(f"{_WHY} …\n")
        else:
            _LOG.warning(f"{_WHY}; `hybrid-memory warmup` does it ahead")
    _has_told = True


def clear() -> None:
    """Remove the line from the terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


def _is_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()
