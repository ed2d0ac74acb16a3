"""A browser does everything that one can do with a conversation, on a server that really generates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import MakePage
from tests.browser.servers import Served
from tests.browser.talking import act, bubbles, expect, last_reply, say, settled, tree_items

CAT, ASK = "My cat is called Milo.", "What is my cat called?"


@pytest.fixture
def page(served: Served, make_page: MakePage) -> Any:
    page = make_page(served.url)
    expect(page.locator("#model")).to_have_text("embedded")
    return page


@pytest.fixture
def cats(page: Any) -> Any:
    """Return a page on which a fact was told and asked for."""
    say(page, CAT)
    say(page, ASK)
    expect(last_reply(page)).to_have_text("Your cat is called Milo.")
    return page


def test_a_conversation_has_a_name_a_tree_and_its_costs(cats: Any) -> None:
    expect(cats.locator("#title")).to_have_text(CAT)
    expect(cats.locator("#sessions li.open .name")).to_have_text(CAT)
    expect(tree_items(cats)).to_have_count(4)
    expect(cats.locator(".spent")).to_have_count(2)
    cats.reload()
    expect(last_reply(cats)).to_have_text("Your cat is called Milo.")
    label = tree_items(cats).first.get_attribute("aria-label")
    assert re.search(r"Going here is (free: |from |the whole prompt, )", label)


def test_the_page_suggests_what_the_embedded_model_can_talk_about(page: Any) -> None:
    suggestions = page.locator(".suggestion")
    expect(page.locator(".welcome")).to_contain_text("names, cities, colours and numbers")
    suggestions.filter(has_text="My cat").click()
    expect(last_reply(page)).to_have_text("Okay, noted.")
    settled(page)
    expect(suggestions).to_have_text(["What is my cat called?"])
    say(page, "My favourite colour is red.")
    expect(suggestions).to_have_text(["What is my favourite colour?", "What is my cat called?"])
    suggestions.first.click()
    settled(page)
    expect(bubbles(page)).to_have_count(6)
    expect(suggestions).to_have_text(["What is my cat called?"])


def test_a_message_that_is_edited_and_answered_is_a_sibling(cats: Any) -> None:
    act(bubbles(cats).first, "Edit")
    cats.get_by_role("textbox", name="The new text").fill("My cat is called Luna.")
    cats.get_by_role("button", name="Save and answer").click()
    expect(bubbles(cats)).to_have_count(2)
    settled(cats)
    say(cats, ASK)
    expect(last_reply(cats)).to_have_text("Your cat is called Luna.")
    expect(bubbles(cats).first.locator(".siblings")).to_have_text("2/2")
    act(bubbles(cats).first, "The version before")
    expect(last_reply(cats)).to_have_text("Your cat is called Milo.")
    expect(tree_items(cats)).to_have_count(8)


def test_a_message_may_be_saved_without_an_answer_and_answered_later(cats: Any) -> None:
    act(bubbles(cats).first, "Edit")
    cats.get_by_role("textbox", name="The new text").fill("My cat is called Nala.")
    cats.get_by_role("button", name="Save only").click()
    expect(bubbles(cats)).to_have_count(1)
    cats.get_by_role("button", name="Answer this").click()
    expect(last_reply(cats)).to_have_text("Okay, noted.")
    settled(cats)


def test_a_reply_may_be_written_by_its_reader(cats: Any) -> None:
    act(bubbles(cats).last, "Edit")
    cats.get_by_role("textbox", name="The new text").fill("Your cat is called Kit.")
    cats.get_by_role("button", name="Save only").click()
    expect(last_reply(cats)).to_have_text("Your cat is called Kit.")
    expect(bubbles(cats).last.locator(".siblings")).to_have_text("2/2")
    say(cats, "My dog is called Rex.")  # The reply is no response of the model, but the conversation continues from it.
    expect(bubbles(cats)).to_have_count(6)


def test_another_reply_stands_beside_the_first(cats: Any) -> None:
    act(bubbles(cats).last, "Another reply")
    expect(bubbles(cats).last.locator(".siblings")).to_have_text("2/2")
    settled(cats)
    expect(tree_items(cats)).to_have_count(5)


def test_a_branch_may_be_a_conversation_of_its_own(cats: Any) -> None:
    n = cats.locator("#sessions li").count()
    act(bubbles(cats).nth(1), "A conversation of its own")
    expect(cats.locator("#sessions li")).to_have_count(n + 1)
    expect(bubbles(cats)).to_have_count(2)
    say(cats, "My dog is called Rex.")


def test_a_reply_goes_on_from_any_of_its_tokens(cats: Any) -> None:
    act(bubbles(cats).last, "Go on from a word")
    cats.get_by_role("slider").fill("2")
    expect(cats.locator("dialog output")).to_contain_text("2 tokens of")
    expect(cats.locator("dialog .cut-text")).to_have_text("Your cat is called Milo.")
    assert "Your".startswith(cats.locator("dialog .cut-text span").first.inner_text()[:4])
    cats.get_by_role("button", name="Go on", exact=True).click()
    expect(bubbles(cats).last.locator(".siblings")).to_have_text("2/2")
    settled(cats)
    expect(last_reply(cats)).to_contain_text("Your")


def test_undo_and_redo(cats: Any) -> None:
    cats.get_by_role("button", name="Undo").click()
    expect(bubbles(cats)).to_have_count(2)
    cats.get_by_role("button", name="Redo").click()
    expect(last_reply(cats)).to_have_text("Your cat is called Milo.")
    cats.locator("#title").focus()
    cats.keyboard.press("Control+z")
    expect(bubbles(cats)).to_have_count(2)


def test_a_branch_is_pinned_and_deleted(cats: Any) -> None:
    act(bubbles(cats).last, "Pin")
    expect(bubbles(cats).last.get_by_role("button", name="Unpin")).to_have_attribute("aria-pressed", "true")
    expect(cats.locator("#tree circle.pinned")).to_have_count(1)
    act(bubbles(cats).nth(2), "Delete")
    cats.get_by_role("button", name="Delete", exact=True).click()
    expect(bubbles(cats)).to_have_count(2)
    expect(tree_items(cats)).to_have_count(2)


def test_a_reply_that_is_stopped_stays(page: Any, served: Served) -> None:
    served.model.talks, served.model.pause_seconds = True, 0.03
    page.fill("#text", CAT)
    page.keyboard.press("Enter")
    expect(last_reply(page)).to_contain_text("Okay")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".note")).to_contain_text("stopped")
    expect(last_reply(page)).to_contain_text("Okay")
    expect(tree_items(page)).to_have_count(2)


def test_text_is_copied(cats: Any) -> None:
    act(bubbles(cats).last, "Copy")
    expect(cats.locator(".toast")).to_have_text("Copied")
    assert cats.evaluate("navigator.clipboard.readText()") == "Your cat is called Milo."


def test_conversations_are_named_searched_and_deleted(cats: Any) -> None:
    entry = cats.locator("#sessions li.open")
    entry.hover()
    entry.get_by_role("button", name="Rename").click()
    cats.get_by_role("textbox", name="Name").fill("About zebras")
    cats.keyboard.press("Enter")
    expect(cats.locator("#title")).to_have_text("About zebras")
    cats.fill("#search", "zebras")
    expect(cats.locator("#sessions li")).to_have_count(1)
    entry = cats.locator("#sessions li")
    entry.hover()
    entry.get_by_role("button", name="Delete").click()
    cats.get_by_role("button", name="Delete", exact=True).click()
    expect(cats.locator("#sessions li")).to_have_count(0)
    expect(cats.locator("#title")).to_have_text("New conversation")


def test_a_conversation_is_exported_and_imported(cats: Any, tmp_path: Path) -> None:
    n = cats.locator("#sessions li").count()
    with cats.expect_download() as download:
        cats.get_by_role("button", name="Export").click()
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    assert json.loads(path.read_text())["format"] == "hybrid-memory.session"
    cats.set_input_files("#import-file", path)
    expect(cats.locator("#sessions li")).to_have_count(n + 1)
    expect(last_reply(cats)).to_have_text("Your cat is called Milo.")
    (tmp_path / "nonsense.json").write_text("{")
    cats.set_input_files("#import-file", tmp_path / "nonsense.json")
    expect(cats.locator(".toast").last).to_contain_text("is no JSON")


def test_settings_are_sent_with_each_message(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Longest reply").fill("3")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Save").click()
    with page.expect_request("**/v1/responses") as request:
        page.fill("#text", CAT)
        page.keyboard.press("Enter")
    sent = json.loads(request.value.post_data)
    assert (sent["temperature"], sent["max_output_tokens"], sent["instructions"]) == (0.25, 3, "Be brief.")


def test_the_tree_is_walked_by_keys(cats: Any) -> None:
    tree_items(cats).last.focus()
    cats.keyboard.press("ArrowUp")
    cats.keyboard.press("ArrowUp")
    cats.keyboard.press("Enter")
    expect(bubbles(cats)).to_have_count(2)
    expect(cats.locator("#tree .node.head")).to_have_attribute("aria-label", re.compile("Okay, noted"))
    cats.keyboard.press("End")
    cats.keyboard.press("Enter")
    expect(bubbles(cats)).to_have_count(4)
