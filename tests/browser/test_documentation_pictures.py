"""A page that was really used gives the pictures of the documentation, and axe checks each of them."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from tests.browser.conftest import PHONE, WIDE, MakePage, settings
from tests.browser.servers import Served, Slowed, serving
from tests.browser.talking import act, bubbles, expect, last_reply, say, settled

Picture = Callable[..., Path]
STORY = ("My cat is called Milo.", "My favourite colour is green.", "What is my cat called?")
TALL = {**WIDE, "height": 940}


@pytest.fixture(scope="module")
def told(language_model: Any, tokenizer: Tokenizer, browser: Any) -> Iterator[tuple[Served, str]]:
    """Return a server with two conversations, one of which has branches, and the address of that one."""
    with serving(Slowed(language_model), tokenizer, ServerOptions(default_tokens=64), budget="4MiB") as server:
        context = browser.new_context(viewport=TALL, reduced_motion="reduce")
        context.add_init_script("localStorage.setItem('hybrid-memory.tour', '1')")
        context.add_init_script(settings(temperature="0"))
        page = context.new_page()
        page.goto(server.url)
        for text in ("I live in Vienna.", "Where do I live?"):
            say(page, text)
        page.get_by_role("button", name="New conversation").click()
        for text in STORY:
            say(page, text)
        act(bubbles(page).first, "Edit")
        page.get_by_role("textbox", name="The new text").fill("My cat is called Luna.")
        page.get_by_role("button", name="Save and answer").click()
        expect(bubbles(page)).to_have_count(2)
        settled(page)
        say(page, "What is my cat called?")
        say(page, "My dog is called Rex.")
        act(bubbles(page).last, "Another reply")
        settled(page)
        act(bubbles(page).nth(3), "Pin")
        yield server, page.url
        context.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the source of axe-core, from npm."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to take axe-core with")
    folder = tmp_path_factory.mktemp("axe")
    packed = subprocess.run(
        ["npm", "pack", "--silent", "axe-core@4"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if packed.returncode:
        pytest.skip("npm could not bring axe-core")
    with tarfile.open(folder / packed.stdout.strip().splitlines()[-1]) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def check(page: Any, axe: str) -> None:
    """Fail for every fault that axe calls serious or critical."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    grave = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["help"], [node["html"][:120] for node in one["nodes"][:3]]) for one in grave] == []


def open_story(make_page: MakePage, told: tuple[Served, str], **options: Any) -> Any:
    page = make_page(told[1], **options)
    expect(last_reply(page)).to_be_visible()
    return page


def test_wide(told: tuple[Served, str], make_page: MakePage, picture: Picture, axe: str) -> None:
    page = open_story(make_page, told, size=TALL)
    expect(page.locator(".sequences button").first).to_be_visible()
    page.locator("#title").hover()
    picture(page, "page-wide")
    check(page, axe)


def test_dark(told: tuple[Served, str], make_page: MakePage, picture: Picture, axe: str) -> None:
    page = open_story(make_page, told, size=TALL, color_scheme="dark")
    expect(page.locator(".part-one svg")).to_be_visible()
    page.locator("#memory-panel").evaluate("panel => { panel.scrollTop = panel.scrollHeight }")
    page.locator("#tree [role=treeitem]").nth(2).hover()
    expect(page.locator("#tip")).to_be_visible()
    picture(page, "page-dark")
    check(page, axe)


def test_phone(told: tuple[Served, str], make_page: MakePage, picture: Picture, axe: str) -> None:
    page = open_story(make_page, told, size=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    picture(page, "page-phone")
    check(page, axe)
    page.get_by_role("button", name="Show the tree and the memory").click()
    page.get_by_role("tab", name="Memory").click()
    expect(page.locator(".part-meter .big")).to_be_visible()
    picture(page, "page-phone-memory")
    check(page, axe)
    page.get_by_role("tab", name="Tree").click()
    picture(page, "page-phone-tree")
    check(page, axe)


def test_dialogs_and_the_first_visit(told: tuple[Served, str], make_page: MakePage, picture: Picture, axe: str) -> None:
    page = make_page(told[0].url, tour=True)
    expect(page.locator("#tour")).to_be_visible()
    picture(page, "page-first-visit")
    check(page, axe)
    page.get_by_role("button", name="Leave the tour").click()
    page.get_by_role("button", name="Settings").click()
    check(page, axe)
