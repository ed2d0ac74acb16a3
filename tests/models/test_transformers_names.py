"""All that the library reads from transformers has the expected name there. Minor versions rename such things."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers import Cache, DynamicCache

from hybridmem.models import ATTACHABLE, HybridCache
from hybridmem.models.hf.attentions import ATTENTIONS
from hybridmem.models.hf.mixers import MIXERS
from tests.models.checkpoints import CACHE_NAME, IS_RENAMED, MAMBA_CACHE_NAME

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "transformers.md"
RIGHT_AS_INHERITED = {
    "is_dummy": "one for each of `layers`, of which there are none",
    "is_sliding": "one for each of `layers`, of which there are none",
    "get_query_offset": "the length of the cache, of which it asks `get_seq_length`",
}
"""Members of `Cache` that a `HybridCache` leaves as they are, and why that is right."""


ONLY_IN_NEWER = {"LaraMiniForCausalLM", "Inkling2LoopForCausalLM"}
FOUND = [name for name in ATTACHABLE if hasattr(transformers, name)]


def test_this_version_of_transformers_is_in_the_guide() -> None:
    tested = re.findall(r"^\| (\d+\.\d+) \|", GUIDE.read_text(), re.MULTILINE)
    minor = ".".join(transformers.__version__.split(".")[:2])
    assert minor in tested, f"run the tests with transformers {minor}, and say in {GUIDE.name} what is tested with it"


def test_every_member_of_a_cache_has_been_thought_of() -> None:
    members = {name for name in dir(Cache) if not name.startswith("_")}
    own = {name for name in vars(HybridCache) if not name.startswith("_")}
    unknown = members - own - RIGHT_AS_INHERITED.keys()
    assert not unknown, f"{sorted(unknown)} of transformers' Cache; let HybridCache have them, or say why it need not"


def test_a_hybrid_cache_takes_the_arguments_of_a_cache() -> None:
    for name, member in vars(HybridCache).items():
        theirs = getattr(Cache, name, None) if not name.startswith("_") else None
        if inspect.isfunction(member) and inspect.isfunction(theirs):
            taken = inspect.signature(member).parameters
            if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
                continue
            assert inspect.signature(theirs).parameters.keys() <= taken.keys(), name


def test_classes_that_can_be_attached_are_there() -> None:
    absent = {name for name in ATTACHABLE if not hasattr(transformers, name)}
    assert absent == (set() if IS_RENAMED else ONLY_IN_NEWER)


@pytest.mark.parametrize("name", FOUND)
def test_models_take_caches_by_a_name_that_attach_knows(name: str) -> None:
    taken = inspect.signature(getattr(transformers, name).forward).parameters
    if name == "RwkvForCausalLM":
        assert "state" in taken and CACHE_NAME not in taken  # `attach` adds this name.
        return
    assert (MAMBA_CACHE_NAME if "Mamba" in name or "xLSTM" in name else CACHE_NAME) in taken


def test_layers_of_a_cache_say_what_attach_asks_of_them() -> None:
    layers = DynamicCache(config=transformers.JambaConfig(num_hidden_layers=8)).layers
    recurrent = [layer for layer in layers if hasattr(layer, "has_previous_state")]
    assert recurrent
    assert all(isinstance(layer.has_previous_state, dict) and hasattr(layer, "record_past") for layer in recurrent)


@cache
def classes() -> frozenset[str]:
    """Return the names of all classes in modules of the architectures that can be attached."""
    modules = {getattr(transformers, name).__module__ for name in FOUND}
    return frozenset(name for module in modules for name in vars(importlib.import_module(module)))


@pytest.mark.parametrize("name", [*MIXERS, *ATTENTIONS])
def test_modules_that_are_replaced_are_there(name: str) -> None:
    if not IS_RENAMED and name.startswith(tuple(newer.removesuffix("ForCausalLM") for newer in ONLY_IN_NEWER)):
        return
    assert name in classes(), f"no module of transformers has a class {name}"
