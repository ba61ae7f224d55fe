"""The page, in a real headless Chromium; skipped where there is none (apt: chromium-headless-shell)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import slipstream

from .conftest import Running, running

_NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    made = context.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.set_default_timeout(15_000)
    yield made
    context.close()
    assert not problems


def ask(page: Page, text: str, **settings: Any) -> None:
    for name, value in {"tokens": 60, "temperature": 0, **settings}.items():
        page.fill(f"#{name}", str(value))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#send")).to_be_enabled()


def test_an_answer_is_coloured_by_origin_and_explains_itself(page: Page, server: Running) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("tiny")
    page.select_option("#drafter", "twin")
    ask(page, "ababababab")
    drafted, own = page.locator(".text .drafted"), page.locator(".text .own")
    expect(drafted).not_to_have_count(0)
    expect(own).not_to_have_count(0)
    colours = [each.first.evaluate("e => getComputedStyle(e).color") for each in (drafted, own)]
    lines = [each.first.evaluate("e => getComputedStyle(e).textDecorationLine") for each in (drafted, own)]
    assert colours[0] != colours[1] and lines == ["underline", "none"]  # not by colour alone
    assert float(page.inner_text("#tau")) > 1 and float(page.inner_text("#rate")) > 0
    expect(page.locator("#positions li")).not_to_have_count(0)
    expect(page.locator("article footer")).to_have_text(re.compile(r"\d+ tokens, .* tokens/s, .* a pass"))
    drafted.filter(has_text=re.compile(r"[ -~]")).first.hover()  # half a character has no width
    inspector = page.locator("#inspector")
    expect(inspector).to_contain_text("drafted, then accepted")
    expect(inspector).to_contain_text(re.compile(r"probability [\d.]+ %"))
    expect(inspector.locator("tr")).to_have_count(5)
    tree = inspector.locator(".tree svg")
    expect(tree.locator("g")).not_to_have_count(1)
    label = tree.get_attribute("aria-label")
    assert label is not None and label.startswith("Draft tree: ") and "(accepted)" in label


def test_the_keyboard_is_enough(page: Page, server: Running) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    ask(page, "abcabc")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.locator(".answer .text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token.chosen")).to_have_attribute("data-index", "1")
    expect(page.locator("#inspector code").first).to_be_visible()
    page.keyboard.press("End")
    expect(page.locator(".token.chosen")).not_to_have_attribute("data-index", "1")
    assert "Answer finished" in (page.text_content("#announce") or "")


def test_side_by_side_shows_the_same_words_twice(page: Page, server: Running) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    page.check("#compare")
    ask(page, "ababab", temperature=0.8, seed=4)
    texts = page.locator(".answer .text").all_text_contents()
    assert len(texts) == 2 and texts[0] == texts[1]
    expect(page.locator("article footer").nth(1)).to_contain_text("the same words")
    expect(page.locator("article").nth(1).locator(".drafted")).to_have_count(0)
    assert float(page.inner_text("#plain-rate")) > 0


def test_escape_stops_and_a_long_chat_goes_on(page: Page, server: Running) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    page.select_option("#drafter", "none")
    page.fill("#tokens", "1900")
    page.fill("#temperature", "1")
    page.fill("#prompt", "go on")
    page.press("#prompt", "Enter")
    expect(page.locator(".text .token").first).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()
    ask(page, "again", tokens=5)
    expect(page.locator("article")).to_have_count(2)


def test_without_a_chat_template_it_goes_on_from_the_text(page: Page, bare: Running) -> None:
    prompts: list[str] = []
    page.on("request", lambda r: prompts.append(r.post_data_json["prompt"]) if r.method == "POST" else None)
    page.goto(bare.url)
    expect(page.locator("#prompt")).to_have_attribute("placeholder", re.compile("Text to go on from"))
    ask(page, "abab ", tokens=12)
    page.locator(".answer .text").focus()
    page.keyboard.press("End")
    expect(page.locator("#inspector")).to_contain_text(re.compile(r"probability [\d.]+ %"))
    expect(page.locator("#inspector tr")).to_have_count(5)
    ask(page, "ba", tokens=3)
    assert prompts[0] == "abab " and prompts[1].startswith("abab ") and prompts[1].endswith("ba")
    assert len(prompts[1]) > len("abab ba")
    expect(page.locator("#alert")).to_be_hidden()


def test_dark_and_light(browser: Browser, server: Running) -> None:
    backs = []
    for scheme in ("dark", "light"):
        context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(server.url)
        read = "getComputedStyle(document.body).backgroundColor"
        backs.append(page.evaluate(read))
        page.click("#theme")
        backs.append(page.evaluate(read))
        context.close()
    assert backs[0] == backs[3] and backs[1] == backs[2] and backs[0] != backs[1]


def test_a_failed_server_is_a_message_and_a_missing_key_too(page: Page, folder: Path) -> None:
    with slipstream.load(str(folder)) as session, running(session, api_keys=("secret",)) as locked:
        page.goto(locked.url)
        expect(page.locator("#alert")).to_contain_text("API key")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        expect(page.locator("#state")).to_have_text("ready")
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    expect(page.locator("#alert")).to_contain_text("cannot be reached")
    expect(page.locator("#state")).to_have_text("not connected")


def test_nothing_is_fetched_from_elsewhere(page: Page, server: Running) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    assert len(asked) > 4 and all(url.startswith(server.url) for url in asked)
