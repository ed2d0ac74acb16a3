"""Makes the imports of torch and transformers faster, for commands that load a model.

Commands call `begin` before either is imported. Three things then take less time:

- The system links torch's largest library in a thread, while Python imports other modules.
- transformers looks for a line in each of its 1,700 files. It gets only the part of the file that has the line.
- torch registers functions that compute the shapes of tensors without numbers. They are registered when its compiler or
  a model class of transformers is imported, or by `complete`.

This module is here, and not in `models`, because it must be imported before torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_WITH_LIBRARIES = (
    "PIL.Image", "asyncio", "csv", "decimal", "hashlib", "markupsafe", "multiprocessing.connection", "numpy", "queue",
    "regex", "ssl", "tokenizers", "yaml",
)  # fmt: skip
"""Modules that load small libraries for transformers and the server. The system links one library at a time, so they
would have to wait until torch's is linked.
"""
_LISTING = "transformers.utils.import_utils"
_REGISTRATIONS = "torch._meta_registrations"
_NEED_REGISTRATIONS = ("torch._dynamo", "transformers.modeling_utils")
_FETCH = "fetch__all__"
"""The function of that module that finds, in the contents of a file, which names the file offers."""
_LINE = "\n__all__"
"""The line for which transformers looks. It says which names a file offers."""


def begin(*meanwhile: str) -> None:
    """Change how torch and transformers are imported, and begin to import torch, unless that has happened.

    Args:
        meanwhile: modules that are imported while the system links torch's library, if they are installed. They do not
            import torch.
    """
    if "torch" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    _import_all(_WITH_LIBRARIES)
    threading.Thread(target=_link_torch, name="torch-ahead", daemon=True).start()
    _import_all(meanwhile)


def complete() -> None:
    """Register the functions for tensors without numbers that `begin` has left out.

    Call it before such tensors are used for more than a GGUF file's dry run, which needs none of these functions.
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.register()


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with suppress(ImportError):  # Whoever needs the module says what to install.
            import_module(name)


def _link_torch() -> None:
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


class _Finder(MetaPathFinder):
    """Changes two modules when they are imported."""

    def __init__(self) -> None:
        self._are_registered = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _REGISTRATIONS and not self._are_registered:
            return ModuleSpec(name, _Nothing())
        if name in _NEED_REGISTRATIONS:
            self.register()
        if name == _LISTING and (found := PathFinder.find_spec(name, path)) is not None and found.loader is not None:
            found.loader = _QuickListing(found.loader)
            return found
        return None

    def register(self) -> None:
        """Import the module that was left empty, or let it be imported as it is."""
        if not self._are_registered:
            self._are_registered = True
            if sys.modules.pop(_REGISTRATIONS, None) is not None:
                import_module(_REGISTRATIONS)


class _Nothing(Loader):
    """Makes a module without contents."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""


class _QuickListing(Loader):
    """Loads a module of transformers with a faster `fetch__all__`, which has the same results."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if (fetch := getattr(module, _FETCH, None)) is not None:
            setattr(module, _FETCH, partial(_from_its_line, fetch))


def _from_its_line(fetch: Callable[[str], Any], content: str) -> Any:
    """Return `fetch(content)`, which searches for the last line that begins with `__all__`, from this line on."""
    return fetch(content[content.rfind(_LINE) + 1 :])
