"""With thousands of messages and hundreds of conversations, the page makes only what can be seen."""

from __future__ import annotations

from benchmarks.page_trees import archive
from tests.browser.conftest import MakePage
from tests.browser.servers import Served
from tests.browser.talking import bubbles, expect, last_reply, say, settled, tree_items

JSON = {"Content-Type": "application/json"}


def test_a_tree_of_two_thousand_messages(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    made = page.request.post(f"{served.url}/v1/sessions/import", data=archive(2000), headers=JSON).json()
    page.goto(f"{served.url}/#{made['id']}")
    page.reload()
    expect(page.locator("#title")).to_have_text("Large")
    expect(bubbles(page)).to_have_count(60)
    expect(tree_items(page).first).to_be_visible()
    assert tree_items(page).count() < 60
    expect(page.locator("#tree .head")).to_be_in_viewport()
    assert page.locator("#tree svg").evaluate("svg => svg.height.baseVal.value") > 2000 * 30

    page.locator("#tree .head").focus()
    page.keyboard.press("Home")
    expect(page.locator("#tree [aria-posinset='1']")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tree [aria-posinset='2']")).to_be_in_viewport()
    page.keyboard.press("End")
    expect(page.locator("#tree [aria-posinset='2000']")).to_be_focused()
    expect(page.locator("#tree [aria-posinset='2000']")).to_be_in_viewport()
    page.locator("#tree-panel").evaluate("panel => { panel.scrollTop = panel.scrollHeight / 2 }")
    far = page.locator("#tree [role=treeitem]:not(.on-path)").nth(8)
    chosen = far.get_attribute("data-node")
    far.click()
    expect(page.locator(f"#tree .head[data-node='{chosen}']")).to_be_in_viewport()
    assert tree_items(page).count() < 60


def test_earlier_messages_are_shown_when_they_are_asked_for(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    made = page.request.post(f"{served.url}/v1/sessions/import", data=archive(400), headers=JSON).json()
    page.goto(f"{served.url}/#{made['id']}")
    page.reload()
    expect(bubbles(page)).to_have_count(60)
    page.locator("#scroll").evaluate("scroll => { scroll.scrollTop = 0 }")
    top = bubbles(page).first
    read, at = top.get_attribute("id"), top.bounding_box()["y"]
    page.get_by_role("button", name="Show earlier messages").click()
    expect(bubbles(page)).to_have_count(120)
    assert abs(page.locator(f"#{read}").bounding_box()["y"] - at) < 80, "what was read is where it was"
    page.fill("#text", "My cat is called Milo.")
    page.keyboard.press("Enter")
    expect(bubbles(page)).to_have_count(120)
    settled(page)
    expect(last_reply(page)).not_to_have_text("")


def test_a_list_of_many_conversations(served: Served, make_page: MakePage) -> None:
    page = make_page(served.url)
    for i in range(60):
        page.request.post(f"{served.url}/v1/sessions", data={"title": f"Talk number {i}"}, headers=JSON)
    page.reload()
    expect(page.locator("#sessions .session")).to_have_count(50)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator("#sessions .session").nth(59)).to_be_attached()
    page.get_by_role("searchbox").fill("Talk number 7")
    expect(page.locator("#sessions .session")).to_have_count(1)
    page.get_by_role("searchbox").fill("")
    say(page, "My cat is called Milo.")
    expect(page.locator("#sessions li.open .name")).to_have_text("My cat is called Milo.")
