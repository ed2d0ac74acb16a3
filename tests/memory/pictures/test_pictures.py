"""Pictures draw bars, boxes and labels with the numbers of `usage()`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hybridmem.memory import HybridMemory, SequenceError, SpecError
from hybridmem.memory.pictures import arena_map, fork_tree, layer_map
from hybridmem.memory.pictures.canvas import need_matplotlib
from hybridmem.memory.pictures.forks import grow, share_out
from hybridmem.memory.pictures.layers import layer_rows
from hybridmem.memory.views.text_tables import format_bytes
from tests.extent import few_cases, only_in_long
from tests.memory.views.test_usage import DENSE, HOSTILE, HYBRID, SPECS, Hostile, family, make, open_in

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402


def texts(figure: Figure) -> list[Text]:
    """Return all text of a picture, without ticks, because matplotlib thins these out by itself."""
    ticks = {id(label) for ax in figure.axes for label in (*ax.get_xticklabels(), *ax.get_yticklabels())}
    return [t for t in figure.findobj(Text) if t.get_text() and t.get_visible() and id(t) not in ticks]


def assert_legible(figure: Figure) -> None:
    """Assert that a picture can be drawn, in a notebook too, and that no text covers another or leaves the picture."""
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert isinstance(figure, Figure) and figure.get_facecolor()[3] == 0, "what is behind it shines through"
    figure.draw_without_rendering()
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts(figure)]
    for (a, box), (b, other) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(other), f"{a!r} and {b!r}"
    for name, box in boxes:
        assert figure.bbox.padded(2).x0 <= box.x0 and box.x1 <= figure.bbox.padded(2).x1, name


# The tests below draw the arena.


def boxes(ax: Axes, label: str) -> Iterator[float]:
    """Return widths, in bytes."""
    for collection in ax.collections:
        if isinstance(collection, PolyCollection) and collection.get_label() == label:
            for path in collection.get_paths():
                yield float(np.ptp(path.vertices[:, 0]))


@few_cases
@pytest.mark.parametrize("name", SPECS)
def test_the_map_of_the_arena_shows_every_byte(name: str) -> None:
    memory = make(SPECS[name])
    if name != "nothing":
        family(memory)
    usage, figure = memory.usage(), arena_map(memory)
    rows = figure.axes[1:]
    assert sum(w for ax in rows for w in boxes(ax, "used")) == usage.used_bytes
    assert sum(w for ax in rows for w in boxes(ax, "shared")) == usage.shared_bytes
    assert sum(boxes(figure.axes[0], "free")) == usage.budget_bytes
    assert_legible(figure)
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels[: len([k for k, n in usage.by_kind.items() if n])] == [k for k, n in usage.by_kind.items() if n]
    assert ("shared by several (3, …: by sequence 3 and others)" in labels) == (
        usage.shared_bytes > 0
    ) and "free" in labels
    assert figure.get_suptitle().startswith(f"{format_bytes(usage.used_bytes)} of 8 MiB in use")


def test_blocks_are_numbered_by_their_sequence() -> None:
    memory = make(HYBRID)
    a = memory.open()
    memory.run(None, {a: [1] * 200})
    numbers = {t.get_text() for ax in arena_map(memory).axes[1:] for t in ax.texts}
    assert numbers == {str(a.id)}
    b = memory.fork(a)
    memory.close(a)
    assert {t.get_text() for ax in arena_map(memory).axes[1:] for t in ax.texts} == {str(b.id)}
    memory.fork(b)
    assert {t.get_text() for ax in arena_map(memory).axes[1:] for t in ax.texts} == {f"{b.id}, …"}


def test_one_block_and_blocks_of_an_open_step_can_be_seen() -> None:
    memory = HybridMemory(SPECS["attention"], "4GiB", page_tokens=4)
    s = memory.open()
    with memory.step({s: [1]}):
        figure = arena_map(memory)
    whole, rows = figure.axes
    assert min(boxes(whole, "used")) >= memory.usage().budget_bytes // 500
    assert sum(boxes(rows, "used")) == memory.usage().used_bytes and "in a step" in {t.get_text() for t in rows.texts}


@only_in_long
def test_ten_thousand_blocks_are_rows_without_numbers() -> None:
    memory = HybridMemory(HYBRID, "64MiB", rollback_window=8, page_tokens=4)
    for i in range(700):
        memory.run(None, {memory.open(): [1] * (1 + i % 60)})
    usage, figure = memory.usage(), arena_map(memory)
    assert sum(n_bytes // usage.block_bytes[name] for name, n_bytes in usage.by_kind.items()) > 10_000
    assert sum(w for ax in figure.axes[1:] for w in boxes(ax, "used")) == usage.used_bytes
    assert not [t for ax in figure.axes for t in ax.texts]
    assert "id of its sequence" not in [t.get_text() for t in figure.legends[0].get_texts()]
    assert figure.get_figheight() < 14
    assert_legible(figure)


# The tests below draw layers.


@pytest.mark.parametrize("name", [name for name in SPECS if name != "nothing"])
@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_rows_of_layers_hold_what_the_sequence_holds(name: str, fold: str) -> None:
    memory = make(SPECS[name], fold=fold)
    for s in family(memory).values():
        if s.closed:
            continue
        rows, usage = layer_rows(memory, s), memory.usage().by_sequence[s.id]
        assert [row.layer for row in rows] == [
            layer for layer, specs in enumerate(memory.spec.layers) for _ in specs or (None,)
        ]
        assert {part: sum(row.bytes_of(part) for row in rows) for part in usage.by_part} == usage.by_part
        assert sum(row.bytes_of("all") for row in rows) == usage.total_bytes
        for stretch in (stretch for row in rows for stretch in row.stretches):
            assert stretch.start == stretch.end == -1 or 0 <= stretch.start <= stretch.end <= s.length, stretch
            assert stretch.part != "tail" or stretch.end == s.length


def test_the_map_of_layers_has_a_bar_for_each_part() -> None:
    """The sequences have 40 tokens and 9 tokens.

    Bodies of recurrences end at 40, where the horizon is. Layer 3 remembers nothing.
    """
    memory = make(HYBRID, fold="keep")
    a = family(memory)["a"]
    figure, rows = layer_map(memory, a), layer_rows(memory, a)
    assert_legible(figure)
    (ax,) = figure.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        "recurrence, mamba  0", "attention  1", "attention, over 9 tokens  2", "recurrence, slow, mamba  2",
        "nothing  3", "recurrence, mamba  4", "attention  5",
    ]  # fmt: skip
    bars = {
        patch.get_gid(): (patch.get_x(), patch.get_x() + patch.get_width()) for patch in ax.patches if patch.get_gid()
    }
    recurrences = {f"{y} {part}": span for y in (0, 3, 5) for part, span in (("body", (0, 40)), ("tail", (40, 49)))}
    assert bars == recurrences | {"1 body": (0, 49), "2 body": (32, 49), "6 body": (0, 49)}
    said = {t.get_gid(): t.get_text() for t in ax.texts if t.get_gid()}
    assert said == {
        f"{y} {part} bytes": format_bytes(n) if (n := row.bytes_of(part)) else "–"
        for y, row in enumerate(rows)
        for part in ("body", "tail", "head", "all")
    }
    total = memory.usage().by_sequence[a.id].total_bytes
    assert figure.get_suptitle() == f"Sequence 0 of hybrid: 49 tokens, {format_bytes(total)} in all layers"
    assert "horizon: rollback reaches 40" in [t.get_text() for t in figure.legends[0].get_texts()]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_label() == "horizon"] == [a.horizon] == [40]


def test_a_state_that_is_stale_after_a_rollback_is_drawn_as_that() -> None:
    """The table still counts its bytes. So the picture has a hollow mark for it at the newest position.

    The next step fills the mark again.
    """
    memory = make(HYBRID, fold="replay")
    s = memory.open()
    memory.run(None, {s: [1] * 51})
    for to, is_stale in ((51, False), (49, True)):
        memory.rollback(s, to=to)
        figure = layer_map(memory, s)
        drawn = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
        assert len(drawn) == 3 and all(line.get_xdata()[0] == to for line in drawn)
        assert [line.get_markerfacecolor() == "none" for line in drawn] == [is_stale] * 3
        labels = [t.get_text() for t in figure.legends[0].get_texts()]
        assert ("head: a state kept ready" in labels) == (not is_stale)
        assert ("head: stale, computed again by the next step" in labels) == is_stale


def test_rows_fold_where_the_grid_says() -> None:
    memory = make(HYBRID, fold="replay")  # Rows fold every 4 tokens.
    s = memory.open()
    memory.run(None, {s: [1] * 51})
    figure = layer_map(memory, s)
    grid = {float(line[0, 0]) for c in figure.axes[0].collections for line in c.get_segments()}
    assert s.horizon == 40 and grid == {44.0, 48.0}


def test_a_long_sequence_shows_its_end_again() -> None:
    memory = HybridMemory(SPECS["sparse"], "8MiB", rollback_window=8)
    s = memory.open()
    memory.run(None, {s: [1] * 5000})
    figure = layer_map(memory, s)
    assert_legible(figure)
    whole, newest = figure.axes
    assert whole.get_xlim() == (0, 5000) and 4900 < newest.get_xlim()[0] < s.horizon and newest.get_xlim()[1] == 5000


def test_an_encoder_has_tokens_of_its_own() -> None:
    memory = make(SPECS["encoder"])
    s = open_in(memory)
    memory.run(None, {s: [1] * 3})
    figure = layer_map(memory, s)
    assert_legible(figure)
    assert "5 tokens of the encoder" in [t.get_text() for t in texts(figure)]


def test_layers_of_sequences_that_are_empty_swapped_closed_or_foreign() -> None:
    memory = make(HYBRID)
    known = family(memory)
    assert "0 tokens, 0 B in all layers" in layer_map(memory, memory.open()).get_suptitle()
    away = layer_map(memory, known["away"])
    assert f"swapped out, {format_bytes(memory.usage().host_bytes)} wait" in away.get_suptitle()
    assert_legible(away)
    for wrong in (known["closed"], make(HYBRID).open()):
        with pytest.raises(SequenceError):
            layer_map(memory, wrong)


# The tests below draw forks.


def test_the_tree_of_forks_shares_all_bytes_out() -> None:
    """Checkpoint 1 and fork 2 of sequence 0 agree on 40 tokens. The others share nothing."""
    memory = make(HYBRID, fold="keep")
    known = family(memory)
    figure, usage = fork_tree(memory), memory.usage()
    assert_legible(figure)
    labels = [t.get_text() for t in figure.axes[0].texts]
    own = {s.id: format_bytes(usage.by_sequence[s.id].private_bytes) for s in known.values() if not s.closed}
    shown = [known[name] for name in ("a", "mark", "fork")]
    root = grow(shown, {s.id: s.tokens for s in shown})
    share_out(root, memory.counters.inventory(*shown))
    assert (root.start, root.end, [(n.start, n.end) for n in root.below]) == (0, 40, [(40, 40), (40, 49), (40, 61)])
    assert labels == [
        f"{format_bytes(root.n_bytes)} shared among 3",
        f"checkpoint 1, 40 tokens: {own[1]} of its own",
        f"sequence 0, 49 tokens: {own[0]} of its own",
        f"sequence 2, 61 tokens: {own[2]} of its own",
        f"sequence 3, 5 tokens: {own[3]} of its own",
        f"sequence 4, 30 tokens: {format_bytes(usage.host_bytes)} swapped out",
    ]
    assert root.n_bytes + sum(n.n_bytes for n in root.below) + usage.by_sequence[3].private_bytes == usage.used_bytes
    assert root.n_bytes == usage.shared_bytes
    markers = [line.get_marker() for line in figure.axes[0].lines if line.get_marker() != "None"]
    assert markers.count("D") == 1 and markers.count("o") == 4


def test_a_fork_of_a_closed_sequence_is_found_by_what_it_shares() -> None:
    memory = make(HYBRID)
    a = memory.open()
    memory.run(None, {a: [1] * 40})
    forks = [memory.fork(a) for _ in range(4)]
    memory.close(a)
    memory.run(None, {s: [2 + i // 2] * 20 + [i] for i, s in enumerate(forks)})
    late = memory.fork(forks[0])
    root = grow([*forks, late], {s.id: s.tokens for s in (*forks, late)})
    assert [sorted(s.id for s in node.sequences) for node in root.below] == [[1, 2, 5], [3, 4]]
    share_out(root, memory.counters.inventory(*forks, late))

    def total(node: object) -> int:
        return node.n_bytes + sum(map(total, node.below))  # type: ignore[attr-defined]

    assert total(root) == memory.usage().used_bytes


@only_in_long
def test_a_tree_shows_forty_and_says_how_many_more() -> None:
    memory = HybridMemory(HYBRID, "1GiB", rollback_window=8)
    a = memory.open()
    memory.run(None, {a: [1] * 40})
    forks = [memory.fork(a) for _ in range(60)]
    memory.run(None, {s: [i % 50] for i, s in enumerate(forks)})
    for _ in range(939):
        memory.open()
    figure = fork_tree(memory)
    assert figure.get_suptitle() == "1,000 sequences and checkpoints; 960 of them are not shown"
    labels = [t.get_text() for t in figure.axes[0].texts]
    assert sum("sequence" in label for label in labels) == 40 and figure.get_figheight() < 25
    assert re.match(r"[\d.]+ KiB shared among 40", labels[0]), "what the hidden ones share is nobody's own"
    assert_legible(figure)


def test_no_sequences() -> None:
    memory = make(HYBRID)
    for figure in (fork_tree(memory), arena_map(memory)):
        assert_legible(figure)
    assert fork_tree(memory).get_suptitle() == "0 sequences and checkpoints"


# The tests below are about names, and matplotlib.


def test_names_are_no_formulas() -> None:
    """Matplotlib would read text between dollar signs as a formula, and refuse bad ones."""
    spec = replace(HYBRID, model=HOSTILE).with_policy(Hostile(8, sinks=1), layers=[1])
    spec = replace(spec, layers=(*spec.layers, (replace(DENSE, name=HOSTILE),)))
    memory = make(spec)
    a = family(memory)["a"]
    for figure in (arena_map(memory), fork_tree(memory), layer_map(memory, a)):
        assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert HOSTILE.replace("$", r"\$") in layer_map(memory, a).get_suptitle()


def test_looking_changes_nothing() -> None:
    memory = make(HYBRID)
    known, before = family(memory), memory.usage()
    arena_map(memory), fork_tree(memory), layer_map(memory, known["a"])
    assert memory.usage() == before
    memory.check()


def test_without_matplotlib_pictures_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make(HYBRID)
    a = memory.open()
    monkeypatch.setattr("hybridmem.memory.pictures.canvas.find_spec", lambda name: None)
    for draw in (lambda: arena_map(memory), lambda: fork_tree(memory), lambda: layer_map(memory, a), need_matplotlib):
        with pytest.raises(SpecError, match=r"pip install 'hybridmem\[notebooks\]'"):
            draw()
