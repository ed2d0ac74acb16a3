"""The memory can hold the context that a server promises, whatever the memory was made with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.server.lengths import find_context_tokens
from hybridmem.memory import CapacityError, HybridMemory
from tests.chat.engines import run_checked
from tests.toy import Toy


@pytest.mark.parametrize(
    "options", [{"page_tokens": 1}, {"page_tokens": 96}, {"page_tokens": 256, "fold": "replay"}, {"rollback_window": 3}]
)
def test_a_prompt_as_long_as_promised_is_served_and_a_longer_one_is_refused(options: dict[str, Any]) -> None:
    model: Any = Toy()
    model.config = SimpleNamespace()
    memory = HybridMemory(model.memory_spec, 64 * 1024, **options)
    engine = Engine(model, memory, None, stop_ids=(), step_tokens=64, max_running=4)
    limit = find_context_tokens(engine, None)
    generation = engine.submit([1] * limit, max_tokens=1)
    run_checked(engine)
    assert limit > 100 and generation.finish_reason == "length"
    with pytest.raises(CapacityError):
        engine.submit([1] * (limit + 2 * memory.page_tokens), max_tokens=1)
