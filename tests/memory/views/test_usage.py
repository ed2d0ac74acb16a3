"""A memory reports numbers that add up. Views show these numbers, whatever things are called."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridmem.memory import (
    AttentionSpec,
    CrossAttentionSpec,
    HybridMemory,
    MemorySpec,
    RecurrentSpec,
    Sequence,
    StateTensor,
)
from hybridmem.memory.errors import HybridMemoryError, SequenceError
from hybridmem.memory.eviction import H2O, Quest, Recent
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.views.palette import COLOURS
from hybridmem.memory.views.text_tables import Table, format_bytes
from tests.extent import few_cases, only_in_long
from tests.inside import layer_memories
from tests.toy import Toy

META = torch.device("meta")
HOSTILE = "<script>alert('x')</script>&\"$\\frac{ $"


@dataclass(frozen=True)
class Hostile(Recent):
    @property
    def label(self) -> str:
        return HOSTILE


MAMBA = RecurrentSpec("mamba", (6,), (StateTensor("conv", (6, 3)), StateTensor("ssm", (6, 8))))
DENSE, WINDOW = AttentionSpec(4, 2, 8), AttentionSpec(4, 2, 8, window=9)
HYBRID = MemorySpec(
    ((MAMBA,), (DENSE,), (WINDOW, replace(MAMBA, name="slow")), (), (MAMBA,), (DENSE,)), 50, device=META, model="hybrid"
)
SPECS = {
    "toy": replace(Toy().memory_spec, device=META),
    "hybrid": HYBRID,
    "attention": MemorySpec(((DENSE,), (WINDOW,)), 50, device=META),
    "recurrent": MemorySpec(((MAMBA,), (MAMBA,)), 50, device=META),
    "sparse": HYBRID.with_policy(H2O(8, recent=2, every=4), layers=[1]).with_policy(Quest(16, recent=1), layers=[5]),
    "quantized": HYBRID.with_storage(Quantized(4, group=8), layers=[1]),
    "encoder": MemorySpec(((DENSE, CrossAttentionSpec(4, 2, 8)), (MAMBA,)), 50, device=META),
    "nothing": MemorySpec(((), ()), 50, device=META),
}


def make(spec: MemorySpec, **options: Any) -> HybridMemory:
    return HybridMemory(spec, "8MiB", **{"rollback_window": 8, "page_tokens": 4} | options)


def open_in(memory: HybridMemory) -> Sequence:
    if not any(isinstance(m, CrossAttentionSpec) for layer in memory.spec.layers for m in layer):
        return memory.open()
    rows = torch.zeros(5, 2, 8, device="meta")
    return memory.open(encoder=[(rows, rows)])


def family(memory: HybridMemory) -> dict[str, Sequence]:
    """Return a memory with a sequence, a checkpoint and a fork of it, and a stranger.

    One more sequence is swapped out, and one is closed.
    """
    a = open_in(memory)
    memory.run(None, {a: [i % 19 for i in range(40)]})
    mark, fork, stranger, away, closed = (
        memory.checkpoint(a),
        memory.fork(a),
        open_in(memory),
        open_in(memory),
        open_in(memory),
    )
    memory.run(None, {a: [1] * 9, fork: [2] * 21, stranger: [3] * 5, away: [4] * 30})
    memory.swap_out(away)
    memory.close(closed)
    return {"a": a, "mark": mark, "fork": fork, "stranger": stranger, "away": away, "closed": closed}


def books(memory: HybridMemory) -> Any:
    """Return everything that looking must not change."""
    inventory = memory.counters.inventory()
    pools = [
        (pool.counts.tolist(), pool.addresses.tolist(), pool.n_used) for g in inventory.groups for pool, _ in g.pools
    ]
    handles = [(s, s.length, s.horizon, s.is_swapped) for s in memory.sequences]
    return pools, inventory.arena.free_bytes, handles


# The tests below are about the numbers.


def assert_adds_up(memory: HybridMemory, sequences: list[Sequence]) -> None:
    before = books(memory)
    usage, counters = memory.usage(), memory.counters
    assert sum(usage.held.values()) == usage.used_bytes == counters.used_bytes == memory.budget - usage.free_bytes
    assert usage.by_kind == counters.bytes_by_pool()
    assert sum(usage.by_group.values()) == sum(usage.by_part.values()) == usage.used_bytes
    assert usage.shared_bytes + usage.private_bytes == usage.used_bytes
    assert list(usage.by_sequence) == [s.id for s in memory.sequences]
    for s in sequences:
        own = usage.by_sequence[s.id]
        assert own.total_bytes == counters.held_bytes(s)
        assert not any(n_bytes % usage.block_bytes[name] for name, n_bytes in own.by_kind.items())
        assert own.private_bytes == memory.private_bytes(s)
        assert (own.n_tokens, own.is_checkpoint) == (s.length, s.is_checkpoint) and s.is_swapped >= (
            own.swapped_bytes > 0
        )
        assert set(own.by_part) <= {"body", "tail", "head"}
    assert sum(s.swapped_bytes for s in usage.by_sequence.values()) == usage.host_bytes + usage.disk_bytes
    assert all((str(usage), repr(usage), memory._repr_html_(), sequences[-1]._repr_html_()))
    assert memory.usage() == usage and books(memory) == before


@few_cases
@pytest.mark.parametrize("name", [name for name in SPECS if name != "nothing"])
@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_bytes_add_up_whatever_happens(name: str, fold: str) -> None:
    """They are counted by kind, layers, part and sequence, as the arena counts them.

    Looking at them changes nothing.
    """
    rng, memory = random.Random(3), make(SPECS[name], fold=fold)
    live: list[Sequence] = []
    for _ in range(40):
        s = rng.choice(live) if live else open_in(memory)
        action = rng.choice(["open", "feed", "feed", "feed", "fork", "checkpoint", "rollback", "swap", "close"])
        try:
            if action == "open" or not live:
                live.append(open_in(memory))
            elif action == "feed":
                memory.run(None, {s: [rng.randrange(7)] * rng.randint(1, 20)})
            elif action in ("fork", "checkpoint"):
                live.append(getattr(memory, action)(s))
            elif action == "rollback":
                memory.rollback(s, to=memory.resume_point(s, rng.randint(0, s.length)))
            elif action == "swap":
                (memory.swap_in if s.is_swapped else memory.swap_out)(s)
            else:
                memory.close(live.pop(live.index(s)))
        except HybridMemoryError:
            continue
        assert_adds_up(memory, live)
    assert len(live) > 3


def test_parts_of_a_sequence() -> None:
    """With a window of 8, the sequence folds at 32 of 41 tokens.

    So it has a body there, a tail, a head at 41 and, as heads are kept, one at 40.
    """
    memory = make(HYBRID, fold="keep")
    s = memory.open()
    memory.run(None, {s: [1] * 40})
    memory.run(None, {s: [1]})
    usage = memory.usage()
    block = usage.block_bytes
    assert usage.by_sequence[s.id].by_part == {
        "body": 11 * block["pages"] + 5 * block["pages over 9"] + block["states"], "head": 2 * block["states"],
        "tail": block["tails"],
    }  # fmt: skip
    assert usage.by_part == usage.by_sequence[s.id].by_part | {"checkpoints": 0, "steps": 0}
    assert usage.by_group == {
        "attention": 11 * block["pages"],
        "attention over 9": 5 * block["pages over 9"],
        "recurrence": 3 * block["states"] + block["tails"],
    }
    assert usage.layers == {"attention": (1, 5), "attention over 9": (2,), "recurrence": (0, 2, 4)}
    with memory.step({s: [1] * 9}):
        inside = memory.usage()
        assert inside.by_part["steps"] > 0 and sum(inside.held.values()) == memory.counters.used_bytes
        assert "41 tokens" in s._repr_html_()


def test_what_only_checkpoints_hold_is_theirs() -> None:
    memory = make(HYBRID)
    s = memory.open()
    memory.run(None, {s: [1] * 40})
    mark = memory.checkpoint(s)
    assert memory.usage().by_part["checkpoints"] == 0, "the live sequence refers to all of it"
    memory.close(s)
    usage = memory.usage()
    assert usage.by_part == {"body": 0, "tail": 0, "head": 0, "checkpoints": usage.used_bytes, "steps": 0}
    assert usage.by_sequence[mark.id].by_part["body"] > 0


def test_what_dropped_tokens_leave_in_states_is_shown_where_the_sequence_stands() -> None:
    spec = MemorySpec(((MAMBA,),), 50, device=META)
    memory = make(spec, fold="keep")
    s = memory.open()
    memory.run(None, {s: [1] * 60})
    memory.drop(s, 3, 13, approximate=True)
    body, *_, tail = memory.counters.inventory(s).groups[0].holdings
    assert body.ends is not None and body.ends.tolist() == tail.starts.tolist() == [48 - 10] and s.length == 50


# The tests below are about text and terminal.


def cells(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()]


def test_usage_prints_as_tables() -> None:
    memory = make(HYBRID, fold="keep")
    known = family(memory)
    usage = memory.usage()
    lines = cells(str(usage))
    assert " in 4 sequences and 1 checkpoint (" in usage.summary, "checkpoints are no sequences that go on"
    assert lines[0] == [usage.summary] and usage.summary in repr(memory) and "\n" not in repr(memory)
    assert lines[2] == ["kind", "body", "tail", "head", "checkpoints", "total", "shared", "a block"]
    assert ["recurrence: tails, 3 layers", "–", *(format_bytes(n) for n in (usage.by_part["tail"],))] == lines[6][:3]
    assert lines[7][-2:] == [format_bytes(usage.used_bytes), format_bytes(usage.shared_bytes)]
    own = usage.by_sequence[known["a"].id]
    shown = [
        own.by_part["body"],
        own.by_part["tail"],
        own.by_part["head"],
        own.total_bytes,
        own.shared_bytes,
        own.private_bytes,
    ]
    assert ["sequence 0", "49", *map(format_bytes, shown), "–"] in lines
    assert lines[-1][0] == f"sequence {known['away'].id}" and lines[-1][-1] == format_bytes(usage.host_bytes)
    for _ in range(30):
        memory.open()
    assert str(memory.usage()).endswith("… and 15 more")
    summary, *tables = str(memory.usage()).splitlines()
    assert max(map(len, tables)) <= 140 and len(summary) <= 160


def test_a_terminal_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    memory = make(replace(HYBRID, model=HOSTILE).with_policy(Hostile(8, sinks=1), layers=[1]))
    family(memory)
    console = Console(width=200, record=True, force_terminal=False)
    console.print(memory.usage())
    plain, rich = cells(str(memory.usage())), cells(console.export_text())
    assert [row for row in plain if len(row) > 1] == [row for row in rich if len(row) > 1]


def test_without_sequences_or_layers() -> None:
    for spec in (SPECS["nothing"], HYBRID):
        memory = make(spec)
        assert (
            "0 sequences" in str(memory)
            and "0 sequences" in str(memory.usage())
            and "0 sequences" in memory._repr_html_()
        )
        s = memory.open()
        memory.run(None, {s: [1, 2]})
        assert "1 sequence " in str(memory.usage()) and "2 tokens" in s._repr_html_()


def test_a_table_aligns_and_says_what_it_hides() -> None:
    assert str(Table(("a", "bb"), [("ccc", "d")], 2000)) == "a    bb\nccc   d\n… and 2,000 more"
    assert str(Table(("a",), [])) == "a"


# The tests below are about HTML.


class Page(HTMLParser):
    """Fails on anything but plain elements with inline style. Collects the text of cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "span", "b", "table", "tr", "th", "td"), tag
        assert {name for name, _ in attributes} <= {"style", "title"}
        assert all("url" not in (value or "") for name, value in attributes if name == "style")
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_html_shows_what_the_tables_say() -> None:
    memory = make(HYBRID)
    family(memory)
    usage, page = memory.usage(), Page(memory._repr_html_())
    assert page.rows == [list(row) for table in usage.tables("html") for row in (table.columns, *table.rows)]
    assert usage.summary in page.text and "HybridMemory for hybrid on meta" in page.text
    widths = [float(x) for x in re.findall(r"width:([\d.]+)%", memory._repr_html_())]
    assert sum(widths) == pytest.approx(100 * usage.used_bytes / usage.budget_bytes, abs=0.01)


def test_html_takes_its_colours_from_the_page() -> None:
    """It can be read on dark and on light pages.

    Text has no colour of its own, and only the parts of the bar have opaque backgrounds.
    """
    memory = make(HYBRID)
    a = family(memory)["a"]
    for html in (memory._repr_html_(), a._repr_html_()):
        assert set(re.findall(r"(?<![-\w])color:([^;\"]+)", html)) == {"inherit"}
        assert set(re.findall(r"background:([^;\"]+)", html)) <= {
            "transparent",
            "rgba(128,128,128,.15)",
            *COLOURS.values(),
        }


def test_names_are_escaped_wherever_they_come_from(tmp_path: Path) -> None:
    hostile = RecurrentSpec(HOSTILE, (6,), (StateTensor(HOSTILE, (6,)),), name=HOSTILE)
    spec = MemorySpec(((hostile,), (replace(DENSE, name=HOSTILE),)), 50, device=META, model=HOSTILE).with_policy(
        Hostile(8, sinks=1)
    )
    memory = make(spec, swap_dir=tmp_path / HOSTILE)
    known = family(memory)
    for view in (memory, memory.usage(), *known.values()):
        page = Page(view._repr_html_())
        assert "script" not in view._repr_html_().replace("&lt;script&gt;", "").replace("&lt;/script&gt;", "")
        assert HOSTILE in page.text or not page.rows or view is memory.usage()


@only_in_long
def test_ten_thousand_sequences_are_a_short_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays count them: each kind is asked once, and never about one sequence.

    Only the sequences that are shown are written.
    """
    memory = HybridMemory(HYBRID, "1GiB", rollback_window=8, page_tokens=4)
    sequences = [memory.open() for _ in range(5000)]
    memory.run(None, {s: [1] * (1 + i % 9) for i, s in enumerate(sequences)}, max_tokens=8000)
    sequences += [memory.fork(s) for s in sequences]
    layers, asked = layer_memories(memory).values(), list[int]()
    n_written = 0
    for kind in layers:
        monkeypatch.setattr(
            kind, "holdings", lambda slots, plain=kind.holdings: asked.append(len(slots)) or plain(slots)
        )
        monkeypatch.setattr(kind, "blocks_of", None)

    def write(n_bytes: float, plain: Any = format_bytes) -> str:
        nonlocal n_written
        n_written += 1
        return plain(n_bytes)

    for module in ("hybridmem.memory.views.text_tables", "hybridmem.memory.views.usage"):
        monkeypatch.setattr(f"{module}.format_bytes", write)
    html = memory._repr_html_()
    assert asked == [10_000] * len(layers) and n_written < 600
    page = Page(html)
    assert len(html) < 500_000 / 4 and len([row for row in page.rows if row[0].startswith("sequence ")]) == 50
    assert "… and 9,950 more" in page.text and "10,000 sequences" in page.text
    assert len(str(memory.usage()).splitlines()) < 40
    asked.clear()
    assert len(sequences[7]._repr_html_()) < 10_000 and asked == [1] * len(layers)


def test_a_handle_shows_itself() -> None:
    memory = make(HYBRID, fold="keep")
    known = family(memory)
    usage = memory.usage()
    a, mark, away = known["a"], known["mark"], known["away"]
    page = Page(a._repr_html_())
    own = usage.by_sequence[a.id]
    assert page.rows[0] == ["kind", "body", "tail", "head", "total", "shared"]
    for row, kind in zip(page.rows[1:], own.by_kind, strict=True):
        parts = {p.part: n for p, n in own.held.items() if p.kind == kind}
        numbers = [parts.get("body", 0), parts.get("tail", 0), parts.get("head", 0), own.by_kind[kind]]
        assert row[1:5] == [format_bytes(n) if n else "–" for n in numbers]
    for words in (
        f"Sequence {a.id}",
        "49 tokens, horizon 40",
        "to 40 … 49, to 0, to checkpoint 1 at 40",
        format_bytes(own.private_bytes),
    ):
        assert words in page.text
    page = Page(mark._repr_html_())
    assert f"Checkpoint {mark.id}" in page.text and "roll back" not in page.text
    page = Page(away._repr_html_())
    assert (
        f"swapped out: {format_bytes(usage.host_bytes)} wait" in page.text
        and "once it is back, it can roll back" in page.text
    )
    assert known["closed"]._repr_html_() == "&lt;sequence 5, closed&gt;"
    for _ in range(12):
        memory.checkpoint(a)
    assert "to 5 more checkpoints" in a._repr_html_()


def test_an_inventory_is_of_open_sequences_of_this_memory() -> None:
    memory = make(HYBRID)
    known = family(memory)
    for wrong in (known["closed"], make(HYBRID).open(), "a"):
        with pytest.raises(SequenceError):
            memory.counters.inventory(wrong)  # type: ignore[arg-type]
    assert memory.counters.inventory(known["away"]).away_bytes.tolist() == [memory.usage().host_bytes]
    assert np.array_equal(memory.counters.inventory(known["a"], known["mark"]).lengths, [49, 40])


def test_host_memory_of_the_books_is_counted_and_shared() -> None:
    """There is a checkpoint at each 32nd of 4,096 tokens.

    They have neither token ids nor tables of their own.
    """
    memory = HybridMemory(Toy().memory_spec, "64MiB", rollback_window=8, page_tokens=4, device="meta")
    sequence = memory.open()
    memory.run(None, {sequence: [1] * 4096})
    before = memory.usage().host
    other = HybridMemory(Toy().memory_spec, "64MiB", rollback_window=8, page_tokens=4, device="meta")
    marked = other.open()
    for _ in range(128):
        other.run(None, {marked: [1] * 32})
        other.checkpoint(marked)
    after = other.usage().host
    assert 8 * 4096 <= before["tokens"] <= after["tokens"] <= 3 * 8 * 4096
    assert 8 * 1024 <= before["books"] <= after["books"] <= before["books"] + 8 * 4096 + 128 * 200
    assert before["swapped out"] == 0
    memory.swap_out(sequence)
    usage = memory.usage()
    assert usage.host["swapped out"] == usage.host_bytes > 0
