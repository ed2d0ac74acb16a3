"""The memory beside the conversation is live, drawn only while it is seen, and readable when it is large."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.page import large_snapshots
from hybridmem.chat.server.memory_view.snapshot import MOST_SEQUENCES
from tests.browser.conftest import PHONE, MakePage
from tests.browser.servers import Served, Slowed, serving
from tests.browser.talking import expect, say

CAT = "My cat is called Milo."


def shown_bytes(page: Any) -> str:
    return str(page.locator(".part-meter .big b").inner_text())


def test_the_page_says_what_the_memory_says(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    say(page, CAT)
    say(page, "What is my cat called?")
    summary = served.engine.memory.usage().summary
    expect(page.locator(".part-meter .big b")).to_have_text(summary.partition(" of ")[0])
    expect(page.locator(".part-request")).to_contain_text("reused")
    rows = page.locator(".sequences button")
    expect(rows).to_have_count(len(served.engine.memory.sequences))
    rows.last.click()
    chosen = rows.last.locator(".name").inner_text()
    expect(page.locator(".part-one h3")).to_contain_text(chosen.strip().capitalize())
    layers = page.locator(".part-one .label").all_text_contents()
    assert len(layers) == len(served.engine.memory.spec.layers) + 1
    page.locator(".part-meter [data-term=tails]").hover()
    expect(page.locator("#tip")).to_contain_text("newest tokens")


def test_calls_that_were_taken_back_are_counted(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    say(page, CAT)
    tile = page.locator(".part-now .tile", has_text="taken back")
    expect(tile).to_have_count(0)
    served.engine.stats.n_taken_back += 2  # The small model calls no tools.
    say(page, "What is my cat called?")
    expect(tile).to_contain_text("2")
    tile.locator("[data-term]").hover()
    expect(page.locator("#tip")).to_contain_text("drawn again")


def test_nothing_is_counted_while_the_memory_is_not_seen(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url, size=PHONE)
    expect(page.locator("#model")).to_have_text("embedded")
    wait_for_listeners(page, served, 0)  # The page of the previous test may be closed only now.
    page.get_by_role("button", name="Show the tree and the memory").click()
    page.get_by_role("tab", name="Memory").click()
    expect(page.locator(".part-meter .big")).to_be_visible()
    assert served.view.n_listeners == 1
    page.get_by_role("button", name="Close", exact=True).click()
    wait_for_listeners(page, served, 0)


def wait_for_listeners(page: Any, served: Served, n: int) -> None:
    for _ in range(3000):
        if served.view.n_listeners == n:
            break
        page.wait_for_timeout(20)
    assert served.view.n_listeners == n


def test_ten_thousand_sequences_stay_readable(served: Served, make_page: MakePage) -> None:
    (data,), _ = large_snapshots(10_000)
    page = make_page(served.url)
    page.route(
        "**/v1/memory/events*",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(data)}\n\n"),
    )
    page.reload()
    expect(page.locator(".part-sequences h3")).to_contain_text("5,000 sequences, 5,000 checkpoints")
    expect(page.locator(".sequences button")).to_have_count(MOST_SEQUENCES)
    expect(page.locator(".part-sequences")).to_contain_text(f"and {10_000 - MOST_SEQUENCES:,} others")


def test_the_tour_tells_edits_branches_shows_and_fills(
    model: Slowed, tokenizer: Any, make_page: MakePage, request: pytest.FixtureRequest
) -> None:
    """The budget is small, so that not all replies of the last step fit at once."""
    with serving(model, tokenizer, budget="2MiB", host_budget="64MiB") as server:
        page = make_page(server.url, tour=True)
        said = page.locator("#tour [role=status]")
        for verb, words in (
            ("Tell it", "Your cat is called Milo."),
            ("Edit it", "Your cat is called Luna."),
            ("Make a branch", "Each line of the tree"),
            ("Show me", "were reused"),
            ("Start 24 replies", "The budget was full"),
        ):
            page.get_by_role("button", name=verb).click()
            expect(said).to_contain_text(words)
            page.locator("#tour .primary").click()
        expect(page.locator("#tour")).to_have_count(0)
        page.reload()
        expect(page.locator("#model")).to_have_text("embedded")
        expect(page.locator("#tour")).to_have_count(0)


def test_the_tour_says_nothing_of_a_full_budget_that_is_not_full(
    model: Slowed, tokenizer: Any, make_page: MakePage
) -> None:
    """On a phone, the panel of the memory is behind a button, and nothing is on the right."""
    with serving(model, tokenizer, budget="1GiB") as server:
        page = make_page(server.url, tour=True, size=PHONE)
        said = page.locator("#tour [role=status]")
        for verb in ("Tell it", "Edit it", "Make a branch", "Show me", "Start 24 replies"):
            expect(said).not_to_contain_text("right")
            page.get_by_role("button", name=verb).click()
            expect(page.locator("#tour .primary")).to_have_text(re.compile("Next|Done"))
            if verb == "Start 24 replies":
                expect(said).to_contain_text(re.compile("All 24 replies came. The budget was not full: at most .* %"))
            page.locator("#tour .primary").click()


def test_each_sentence_of_the_tour_has_its_condition(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)

    def said(what: str, happened: dict[str, Any]) -> str:
        return str(page.evaluate(f"async (it) => (await import('/page/tour.js')).{what}(it)", happened))

    quiet = {"peak": 30 << 20, "budget": 1 << 30, "nMadeRoom": 0, "nSwaps": 0, "nWaiting": 5, "nWhole": 24, "n": 24}
    assert said("saidOfFilling", quiet).startswith("All 24 replies came. The budget was not full: at most 2.9 %")
    full = said("saidOfFilling", {**quiet, "peak": 1 << 30})
    assert full == "The budget was full, 100 % of it in use: up to 5 conversations waited. All 24 replies came."
    moved = said("saidOfFilling", {**quiet, "nMadeRoom": 2, "nSwaps": 3, "nWhole": 23})
    assert moved.startswith("The budget was full: replies made room 2 times, with 3 swaps") and "23 of 24" in moved
    assert "full" not in said("saidOfFilling", {**quiet, "budget": 0})
    tokens = {"reused": 0, "replayed": 0, "computed": 20, "why": "no checkpoint is there"}
    assert said("saidOfReuse", tokens).startswith("Nothing was reused: all 20 tokens")
    assert "the model read 20; 30 were reused" in said("saidOfReuse", {**tokens, "reused": 30})


def test_an_icon_stands_for_one_action(served: Served, make_page: MakePage) -> None:
    """The first word of a button's name says what it does.

    To delete a message and to delete a conversation is one action.
    """
    page = make_page(served.url)
    say(page, CAT)
    found = page.evaluate(
        """() => [...document.querySelectorAll("button:has(svg.i)")].map((button) =>
            [[...button.querySelector("svg.i").classList].at(-1), button.ariaLabel || button.innerText])"""
    )
    actions: dict[str, set[str]] = {}
    for icon, name in found:
        actions.setdefault(icon, set()).add(name.split()[0].strip(":"))
    assert len(actions) > 10 and {icon: names for icon, names in actions.items() if len(names) > 1} == {}
