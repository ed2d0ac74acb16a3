"""The page says in words what went wrong, where it happened, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from tests.browser.conftest import MakePage, settings
from tests.browser.servers import LONGEST_REPLY, Served, Slowed, folder_for, serving
from tests.browser.talking import act, bubbles, expect, last_reply, say, settled, tree_items

CAT = "My cat is called Milo."
HOSTILE = {
    "script": "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>",
    "link": "[click](javascript:window.broken=1) ![x](https://example.com/x.png)",
    "bidi": "before \u202egnp.exe\u202c after \u2066\u2069",
    "long": "w" * 4000,
    "deep": "> " * 4000,
}


def test_two_pages_on_one_conversation(served: Served, make_page: MakePage) -> None:
    """Both pages may write. Each shows what the other has written when it is looked at again."""
    one = make_page(served.url)
    say(one, CAT)
    two = make_page(one.url, context=one.context)
    expect(bubbles(two)).to_have_count(2)
    say(one, "My dog is called Rex.")
    say(two, "What is my cat called?")
    expect(tree_items(two)).to_have_count(6)
    one.evaluate("window.dispatchEvent(new Event('focus'))")
    expect(tree_items(one)).to_have_count(6)
    expect(last_reply(two)).to_have_text("Your cat is called Milo.")


def test_a_reload_in_the_middle_of_a_reply(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    served.model.talks, served.model.pause_seconds = True, 0.03
    page.fill("#text", CAT)
    page.keyboard.press("Enter")
    expect(last_reply(page)).to_contain_text("Okay")
    page.reload()
    served.model.pause_seconds = 0.0
    expect(bubbles(page).first.locator(".text")).to_have_text(CAT)
    expect(last_reply(page)).to_contain_text("Okay")
    expect(page.locator(".note")).to_contain_text("stopped")


def test_a_server_that_is_restarted(model: Slowed, tokenizer: Tokenizer, make_page: MakePage, tmp_path: Path) -> None:
    with serving(model, tokenizer, folder_for(tmp_path)) as first:
        page, port = make_page(first.url), first.port
        say(page, CAT)
    page.fill("#text", "What is my cat called?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    with serving(model, tokenizer, folder_for(tmp_path), port=port):
        page.get_by_role("button", name="Try again").click()
        expect(last_reply(page)).to_have_text("Your cat is called Milo.")
        settled(page)


def test_a_server_that_is_restarted_and_keeps_nothing(model: Slowed, tokenizer: Tokenizer, make_page: MakePage) -> None:
    with serving(model, tokenizer) as first:
        page, port = make_page(first.url), first.port
        say(page, CAT)
    with serving(model, tokenizer, port=port):
        page.fill("#text", "My dog is called Rex.")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("no longer has this conversation")
        page.get_by_role("button", name="Say it in a new conversation").click()
        expect(bubbles(page)).to_have_count(2)
        expect(last_reply(page)).to_have_text("Okay, noted.")
        settled(page)


def test_a_conversation_that_was_deleted_elsewhere(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    say(page, CAT)
    gone = page.url.partition("#")[2]
    page.get_by_role("button", name="New conversation").click()
    say(page, "My cat is called Luna.")
    page.request.delete(f"{served.url}/v1/sessions/{gone}")
    page.locator("#sessions .session", has_text=CAT).first.click()
    expect(page.locator(".toast")).to_contain_text("There is no session")
    expect(page.locator("#title")).to_have_text("My cat is called Luna.")
    say(page, "What is my cat called?")
    expect(last_reply(page)).to_have_text("Your cat is called Luna.")


def test_a_server_that_wants_a_key(model: Slowed, tokenizer: Tokenizer, make_page: MakePage) -> None:
    with serving(model, tokenizer, ServerOptions(api_key="open sesame", default_tokens=64)) as server:
        page = make_page(server.url)
        page.get_by_role("textbox", name="API key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("dialog")).to_contain_text("That was not the key")
        page.get_by_role("textbox", name="API key").fill("open sesame")
        page.get_by_role("button", name="Use this key").click()
        say(page, CAT)
        expect(page.locator(".part-meter .big")).to_contain_text("MiB")
        page.reload()
        expect(last_reply(page)).to_have_text("Okay, noted.")


def test_a_server_that_is_busy(model: Slowed, tokenizer: Tokenizer, make_page: MakePage) -> None:
    with serving(
        model, tokenizer, ServerOptions(max_requests=1, default_tokens=LONGEST_REPLY, grace_seconds=0.2)
    ) as server:
        one, two = make_page(server.url), make_page(server.url)
        model.talks, model.pause_seconds = True, 0.03
        one.fill("#text", CAT)
        one.keyboard.press("Enter")
        expect(last_reply(one)).to_contain_text("Okay")
        two.fill("#text", CAT)
        two.keyboard.press("Enter")
        expect(two.get_by_role("alert")).to_contain_text("The server is busy")
        one.get_by_role("button", name="Stop").click()
        expect(one.locator(".note")).to_be_visible()
        model.talks, model.pause_seconds = False, 0.0
        two.get_by_role("button", name="Try again").click()
        expect(last_reply(two)).to_have_text("Okay, noted.")


@pytest.mark.parametrize("status", [503, 500])
def test_a_server_that_cannot(served: Served, make_page: MakePage, status: int) -> None:
    page = make_page(served.url)
    said = {
        "error": {"message": "The memory cannot hold this now.", "type": "server_error", "param": None, "code": "x"}
    }
    page.route("**/v1/responses", lambda route: route.fulfill(status=status, json=said))
    page.fill("#text", CAT)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The memory cannot hold this now.")
    page.get_by_role("button", name="Edit the message").click()
    expect(page.locator("#text")).to_have_value(CAT)
    page.unroute("**/v1/responses")
    page.keyboard.press("Enter")
    expect(last_reply(page)).to_have_text("Okay, noted.")
    settled(page)


def test_who_writes_before_the_page_knows_the_model_is_answered(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    page.route("**/v1/models", lambda route: page.wait_for_timeout(300) or route.continue_())
    page.reload()
    page.fill("#text", CAT)
    page.keyboard.press("Enter")
    expect(last_reply(page)).to_have_text("Okay, noted.")
    settled(page)


def test_a_model_that_breaks(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    say(page, CAT)
    served.model.error = RuntimeError("broken")
    page.fill("#text", "What is my cat called?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    served.model.error = None
    page.get_by_role("button", name="Try again").click()
    expect(last_reply(page)).to_have_text("Your cat is called Milo.")
    settled(page)


def test_a_reply_of_two_thousand_tokens(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    served.model.talks = True
    page.context.add_init_script(settings(max_output_tokens="2000", temperature="1"))
    page.reload()
    page.fill("#text", CAT)
    page.keyboard.press("Enter")
    expect(page.locator(".spent")).to_contain_text("2,000 tokens in", timeout=600_000)
    assert len(last_reply(page).inner_text()) > 2000


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_is_text(served: Served, make_page: MakePage, kind: str) -> None:
    """The text comes as a message, as a reply, in the list, in the tree and as a title."""
    page, text = make_page(served.url), HOSTILE[kind]
    say(page, CAT)
    act(bubbles(page).last, "Edit")
    page.get_by_role("textbox", name="The new text").fill(text)
    page.get_by_role("button", name="Save only").click()
    expect(bubbles(page).last.locator(".siblings")).to_have_text("2/2")
    act(bubbles(page).first, "Edit")
    page.get_by_role("textbox", name="The new text").fill(text)
    page.get_by_role("button", name="Save only").click()
    expect(bubbles(page)).to_have_count(1)
    session, headers = page.url.partition("#")[2], {"Content-Type": "application/json"}
    page.request.post(f"{served.url}/v1/sessions/{session}", data={"title": text[:200]}, headers=headers)
    page.reload()
    expect(page.locator("#title")).to_have_text(text[:200])
    expect(bubbles(page).first.locator(".text")).to_have_text(text)
    labels = [item.get_attribute("aria-label") for item in tree_items(page).all()]
    assert sum(text[:12] in label for label in labels) == 2
    assert page.evaluate("window.broken") is None
    assert page.locator("#app script, #app img[onerror], a[href^=javascript]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
