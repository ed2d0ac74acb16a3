"""Does with a page what a reader would do."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

expect.set_options(timeout=60_000)  # A busy machine is slow. Nothing waits this long if all is well.

__all__ = ["act", "bubbles", "expect", "last_reply", "say", "settled", "tree_items"]


def say(page: Any, text: str) -> None:
    """Send a message, and wait for the whole reply."""
    n = bubbles(page).count()
    page.fill("#text", text)
    page.keyboard.press("Enter")
    expect(bubbles(page)).to_have_count(n + 2)
    settled(page)


def settled(page: Any) -> None:
    """Wait until no reply is in progress."""
    expect(page.locator(".growing")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()


def bubbles(page: Any) -> Any:
    return page.locator("#messages .message")


def last_reply(page: Any) -> Any:
    return page.locator("#messages .message.assistant .text").last


def tree_items(page: Any) -> Any:
    return page.locator("#tree [role=treeitem]")


def act(message: Any, name: str) -> None:
    """Press a button of a message."""
    message.hover()
    message.get_by_role("button", name=re.compile(f"^{name}")).click()
