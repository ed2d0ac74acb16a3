"""Links torch's library while Python imports other modules, for commands that load a model.

The system takes a second to link torch's largest library, and needs no interpreter for it. So commands call `begin`
before torch is imported: a thread links the library, and meanwhile Python imports what does not need torch.

This module is here, and not in `models`, because it must be imported before torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_WITH_LIBRARIES = (
    "PIL.Image", "asyncio", "csv", "decimal", "hashlib", "markupsafe", "multiprocessing.connection", "numpy", "queue",
    "regex", "ssl", "tokenizers", "yaml",
)  # fmt: skip
"""Modules that load small libraries for transformers and the server. The system links one library at a time, so they
would have to wait until torch's is linked.
"""


def begin(*meanwhile: str) -> None:
    """Begin to link torch's library, unless torch is imported.

    Args:
        meanwhile: modules that are imported at the same time, if they are installed. They do not import torch.
    """
    if "torch" in sys.modules:
        return
    _import_all(_WITH_LIBRARIES)
    threading.Thread(target=_link, name="torch-ahead", daemon=True).start()
    _import_all(meanwhile)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with suppress(ImportError):  # Whoever needs the module says what to install.
            import_module(name)


def _link() -> None:
    """Link torch's library as `import torch` will, without holding Python's lock."""
    found = find_spec("torch")
    if not sys.platform.startswith("linux") or found is None or found.origin is None:
        return
    folder = Path(found.origin).parent / "lib"
    link = ctypes.CDLL(None).dlopen
    link.argtypes, link.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # If one cannot be linked, `import torch` says why.
    for name, scope in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_LOCAL)):
        link(os.fsencode(folder / name), os.RTLD_NOW | scope)
