"""A live picture has the numbers of `usage()`, and is drawn only when something has changed, while steps run."""

from __future__ import annotations

import gc
import queue
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from hybridmem.memory import SpecError
from hybridmem.memory.pictures import Watch, watch
from hybridmem.memory.pictures.cells import arena_of
from hybridmem.memory.pictures.forks import label_of, trees_of
from hybridmem.memory.pictures.live import draw
from hybridmem.memory.pictures.svg import WIDTH, arena_svg
from tests.memory.views.test_usage import HYBRID, SPECS, books, family, make, open_in

ROWS = 12


@pytest.mark.parametrize("name", SPECS)
def test_a_live_picture_shows_every_byte_and_every_sequence(name: str) -> None:
    memory = make(SPECS[name])
    family(memory)
    before = books(memory)
    texts = [text.text for text in ElementTree.fromstring(draw(memory)).iter() if text.text]
    roots, title = trees_of(memory)

    def labels(nodes: list[Any]) -> set[str]:
        return {label_of(node, memory) for node in nodes} | {text for node in nodes for text in labels(node.below)}

    assert labels(roots) | {title} <= set(texts)
    assert books(memory) == before
    inventory = memory.counters.inventory()
    arena = arena_of(inventory)
    svg = ElementTree.fromstring(arena_svg(arena, memory.budget))
    free, *used = [path for path in svg if path.get("d") and path.get("fill") != "#00000099"]
    widths = [float(h) for path in used for y, h in re.findall(r" (\d+)h([\d.]+)v14", path.get("d")) if int(y) > 0]
    row_bytes = -(-sum(end - start for start, end in arena["regions"]) // ROWS)
    assert sum(widths) / WIDTH * row_bytes == pytest.approx(inventory.arena.used_bytes, rel=0.02, abs=1)
    assert "h760.0" in free.get("d", "")


def test_a_watch_draws_when_something_has_changed_and_ends_with_the_memory() -> None:
    memory, shown = make(HYBRID), list[str]()
    one = Watch(memory, shown.append)
    assert one.refresh() and one.refresh() and len(shown) == 1
    a = memory.open()
    memory.run(None, {a: [1] * 10})
    assert one.refresh() and len(shown) == 2 and "sequence 0, 10 tokens" in shown[1]
    memory.run(None, {a: [1]})  # The token fits into the page, so no byte is added.
    assert one.refresh() and len(shown) == one.n_drawn == 3
    memory.close_all()
    assert not one.refresh() and len(shown) == 3
    memory = make(HYBRID)
    other = Watch(memory, shown.append)
    del memory
    gc.collect()
    assert not other.refresh()


def test_a_watch_draws_beside_steps_until_another_one_replaces_it() -> None:
    memory, shown = make(SPECS["toy"]), queue.Queue[str]()
    one = Watch(memory, shown.put, times_a_second=50).start()
    assert "0 B of 8 MiB in use" in shown.get(timeout=600)
    known = [open_in(memory) for _ in range(4)]
    for _ in range(60):
        memory.run(None, {s: [1] for s in known})
    with Watch(memory, shown.put, times_a_second=50).start() as other:
        assert not one.is_running and other.is_running
    assert (one.error, other.error) == (None, None) and not other.is_running
    last = ""
    while not shown.empty():
        last = shown.get()
    assert "sequence 3, 60 tokens" in last, "what was there in the end"


def test_a_picture_that_cannot_be_shown_ends_the_watch_with_its_error() -> None:
    memory, said = make(HYBRID), list[str]()

    def publish(html: str) -> None:
        said.append(html)
        if len(said) == 1:
            raise OSError("no room")

    one = Watch(memory, publish).start()
    one.stop()
    assert "no room" in said[-1] and "no room" in repr(one)


def test_watch_needs_a_notebook_and_shows_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make(HYBRID)
    with pytest.raises(SpecError, match=r"print\(memory\.usage\(\)\)"):
        watch(memory)
    with pytest.raises(SpecError, match="times_a_second=0"):
        watch(memory, times_a_second=0)
    with pytest.raises(SpecError, match="is no HybridMemory"):
        watch("memory")  # type: ignore[arg-type]
    said = list[tuple[str, Any]]()
    display = pytest.importorskip("IPython.display")
    monkeypatch.setattr("IPython.get_ipython", object)
    for name in ("display", "update"):
        monkeypatch.setattr(display.DisplayHandle, name, lambda self, html, name=name: said.append((name, html.data)))
    with watch(memory):
        pass
    assert [name for name, _ in said][:2] == ["display", "update"] and "<svg" in said[-1][1]
