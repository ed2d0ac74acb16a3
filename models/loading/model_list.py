"""Imports `transformers.models` without reading its two thousand files a second time.

`import transformers` reads all files of its models, to learn which module has which class. The package
`transformers.models` then reads the same files to make the same list, which takes a fifth of a second. Here it gets the
list that was already made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

_PREFIX = "models."


def import_models() -> None:
    """Import `transformers.models`. If transformers lists its models in another way, it reads them itself."""
    import transformers

    with _listed_once(Path(transformers.__file__).parent / "models"):
        import_module("transformers.models")


@contextmanager
def _listed_once(folder: Path) -> Iterator[None]:
    """Inside the block, `transformers.models` gets the list of models that transformers itself has made."""
    listing: Any = import_module("transformers.utils.import_utils")
    make: Any = getattr(listing, "define_import_structure", None)
    if not hasattr(make, "cache_info"):
        yield
        return
    listing.define_import_structure = wraps(make)(partial(_list, make, folder))
    try:
        yield
    finally:
        listing.define_import_structure = make


def _list(make: Callable[..., Any], folder: Path, place: str, prefix: str | None = None) -> Any:
    """Return `make(place, prefix)`. The list of all models without a prefix follows from the list with one."""
    if Path(place).parent != folder or prefix is not None:
        return make(place, prefix)
    whole: Mapping[Any, Mapping[str, Any]] = make(folder, prefix=_PREFIX.rstrip("."))
    return {
        needs: {name.removeprefix(_PREFIX): objects for name, objects in modules.items() if name.startswith(_PREFIX)}
        for needs, modules in whole.items()
    }
