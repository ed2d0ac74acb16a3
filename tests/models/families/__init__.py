"""Makes random checkpoints of each architecture, one module for each.

`CONFIGS` names small configs with all its options.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from transformers import PreTrainedConfig

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {}
for _name in (module.name for module in pkgutil.iter_modules(__path__)):
    if not _name.startswith("test_"):  # Tests of single families stand beside their configs.
        CONFIGS |= getattr(importlib.import_module(f"{__name__}.{_name}"), "CONFIGS", {})
