"""Makes a browser for all tests, a server for each file, and pages whose errors fail their test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from hybridmem.chat.prompts import Tokenizer, find_stop_ids, load_tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from tests.browser.servers import LONGEST_REPLY, Served, Slowed, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra 'browser' is not installed")

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --force-color-profile=srgb"
).split()
WIDE = {"width": 1360, "height": 860}
PHONE = {"width": 390, "height": 844}
MakePage = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="write the pictures of the documentation anew")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no browser at {CHROMIUM}: apt-get install chromium, or set CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def language_model() -> LanguageModel:
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    return load_model("embedded")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EMBEDDED)


@pytest.fixture
def model(language_model: LanguageModel, tokenizer: Tokenizer) -> Slowed:
    return Slowed(language_model, find_stop_ids(tokenizer, language_model))


@pytest.fixture(scope="module")
def shared(language_model: LanguageModel, tokenizer: Tokenizer) -> Iterator[Served]:
    slowed = Slowed(language_model, find_stop_ids(tokenizer, language_model))
    with serving(slowed, tokenizer, ServerOptions(default_tokens=LONGEST_REPLY, grace_seconds=0.2)) as server:
        yield server


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """Return the server of the file. After each test it is quick and polite again."""
    yield shared
    shared.model.pause_seconds, shared.model.talks, shared.model.error = 0.0, False, None


@pytest.fixture
def make_page(browser: Any) -> Iterator[MakePage]:
    """Open pages, each in a profile of its own unless one is given. What a page logs as an error fails the test."""
    contexts: list[Any] = []
    errors: list[str] = []

    def make(url: str, *, size: dict[str, int] = WIDE, context: Any = None, tour: bool = False, **options: Any) -> Any:
        if context is None:
            context = browser.new_context(viewport=size, locale="en", reduced_motion="reduce", **options)
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            if not tour:
                context.add_init_script("localStorage.setItem('hybrid-memory.tour', '1')")
            context.add_init_script(
                "localStorage.setItem('hybrid-memory.settings', JSON.stringify({temperature: '0'}))"
            )
            contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def picture(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Write a picture of a page: into the documentation with --pictures, else into a folder of the test."""
    folder = tmp_path
    if request.config.getoption("--pictures"):
        folder = Path(__file__).parent.parent.parent / "docs" / "pictures"
        folder.mkdir(exist_ok=True)

    def write(page: Any, name: str) -> Path:
        path = folder / f"{name}.png"
        page.screenshot(path=path, animations="disabled", caret="hide")
        return path

    return write


def settings(**values: str) -> str:
    """Return a script that sets settings of the page."""
    return f"localStorage.setItem('hybrid-memory.settings', JSON.stringify({json.dumps(values)}))"
