"""The dashboard in a real Chromium, against a scripted engine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from morph.config import EngineConfig
from morph.server.app import create_app
from tests.server.conftest import LiveServer, running
from tests.server.fake import ANSWER, FakeEngine

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright (extra dev)")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the path (Debian package chromium)")

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCREENSHOTS = os.environ.get("MORPH_SCREENSHOTS")
"""Folder for pictures."""
SERVER = os.environ.get("MORPH_DASHBOARD_URL", "")
"""A running server; with both, the pictures of docs/images are made of it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, live: LiveServer) -> Iterator[Any]:
    live.engine.delay = 0.005
    page = browser.new_page(viewport={"width": 1180, "height": 1000}, color_scheme="light")
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.goto(live.url)
    page.wait_for_selector('#status[data-state="live"]')
    yield page
    page.close()
    assert not [fault for fault in faults if "Failed to load resource" not in fault], faults


def until(page: Any, condition: str) -> None:
    """Wait for a JavaScript condition; the page's own policy forbids what `wait_for_function` does."""
    deadline = time.monotonic() + 120
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never true: {condition}"
        time.sleep(0.02)


def picture(page: Any, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


def run(page: Any) -> None:
    page.click("#run")
    until(page, "!document.getElementById('run').disabled")


def test_figures_come_and_requests_show_their_layouts(page: Any, live: LiveServer) -> None:
    assert page.text_content("#model") == "fake-1"
    live.engine.delay = 0.05
    page.click("#run")
    page.wait_for_selector("#requests tr .strip .bit")
    labels = page.eval_on_selector_all("#requests .strip[aria-label]", "all => all.map(e => e.ariaLabel)")
    assert "2 of 4 blocks on attention: 1001" in labels
    picture(page, "dashboard")
    until(page, "!document.getElementById('run').disabled")
    until(page, "document.getElementById('finished').textContent === '3'")
    until(page, "!document.querySelector('#requests tr')")
    assert page.is_visible("#idle")
    assert "p50" in page.text_content("section[aria-labelledby=latency-title]")
    assert float(page.text_content("#ttft td:nth-of-type(1)")) > 0
    assert "30.0 %" in page.get_attribute("#memory", "aria-label")


def test_the_playground_marks_what_differs(page: Any, live: LiveServer) -> None:
    scripted = live.engine._tokens

    def by_layout(ids: Any, params: Any, request_id: str, layout: Any) -> Any:
        live.engine.answer = "the sky is blue" if params.layout == "attention" else "the sky looks blue"
        return scripted(ids, params, request_id, layout)

    live.engine._tokens = by_layout  # type: ignore[method-assign]
    run(page)
    assert page.text_content('article[data-layout="attention"] .text') == "the sky is blue"
    for layout in ("auto", "ssm"):
        assert page.eval_on_selector_all(f'article[data-layout="{layout}"] mark', "m => m.map(e => e.textContent)") == [
            "looks"
        ]
    assert page.locator('article[data-layout="attention"] mark').count() == 0
    assert "of 4 blocks on attention" in page.text_content('article[data-layout="auto"] .facts')


def test_the_slider_sets_the_budget_of_auto(page: Any, live: LiveServer) -> None:
    page.focus("#budget")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    assert page.text_content("#budget-value") == "0.35"
    run(page)
    budgets = {str(params.layout): params.attention_budget for _, params in live.engine.seen}
    assert budgets["auto"] == 0.35


def test_an_error_is_shown_and_nothing_hangs(page: Any) -> None:
    page.fill("#prompt", "x" * 2000)
    run(page)
    assert "the context is 512" in page.text_content('article[data-layout="attention"] .facts')


def test_an_answer_is_text_not_markup(page: Any, live: LiveServer) -> None:
    live.engine.answer = "<img src=x onerror=alert(1)> <b>bold</b>"
    run(page)
    assert page.locator("#answers img, #answers b").count() == 0
    assert "<b>bold</b>" in page.text_content('article[data-layout="ssm"] .text')


def test_keyboard_alone_runs_a_prompt(page: Any) -> None:
    page.focus("#prompt")
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "run"
    page.keyboard.press("Enter")
    until(page, "document.querySelector('article[data-layout=ssm] .facts').textContent.includes('tokens/s')")


@pytest.mark.parametrize("width", [360, 768])
def test_no_horizontal_scroll_on_small_screens(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    run(page)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if width == 360:
        picture(page, "dashboard-phone")


def test_dark_by_choice_and_remembered(page: Any) -> None:
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    page.wait_for_selector('#status[data-state="live"]')
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    run(page)
    picture(page, "dashboard-dark")


def test_it_says_when_the_server_is_gone_and_comes_back(page: Any, live: LiveServer) -> None:
    page.context.set_offline(True)
    live.engine.alive = False
    page.wait_for_selector('#status[data-state="lost"]')
    live.engine.alive = True
    page.context.set_offline(False)
    page.wait_for_selector('#status[data-state="live"]', timeout=20_000)


def test_a_key_is_asked_for_and_a_wrong_one_refused(browser: Any, engine: FakeEngine) -> None:
    with running(create_app(engine, api_keys=("the-right-key",))) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#login:not([hidden])")
        page.fill("#key", "a-wrong-key")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('key-note').textContent.includes('does not know')")
        assert page.text_content("#status") == "needs a key"
        page.fill("#key", "the-right-key")
        page.keyboard.press("Enter")
        page.wait_for_selector('#status[data-state="live"]')
        assert page.is_hidden("#login")
        run(page)
        assert page.text_content('article[data-layout="auto"] .text') == ANSWER
        # Kept by the tab, and by the tab alone.
        page.reload()
        page.wait_for_selector('#status[data-state="live"]')
        assert "the-right-key" not in page.evaluate("JSON.stringify(localStorage)")
        page.close()
    assert len(engine.seen) == 3


def test_a_model_without_choices_shows_the_base_alone(browser: Any, engine: FakeEngine) -> None:
    engine.config = replace(engine.config, ssm=None, block_kinds=("attention",) * engine.config.num_blocks)
    with running(create_app(engine)) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector('#status[data-state="live"]')
        assert page.is_visible('article[data-layout="attention"]')
        for hidden in ('article[data-layout="auto"]', 'article[data-layout="ssm"]', "#server-budget"):
            assert page.is_hidden(hidden)
        run(page)
        assert page.text_content('article[data-layout="attention"] .text') == ANSWER
        page.close()
    assert [params.layout for _, params in engine.seen] == ["attention"]


def test_hundreds_of_requests_are_shown_in_part_and_counted(page: Any, live: LiveServer) -> None:
    live.engine.engine_config = EngineConfig(max_waiting=1000)
    live.engine.hold = True
    body = {"model": "fake-1", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(httpx.post, live.url + "/v1/chat/completions", json={**body, "n": n}, timeout=60)
            for n in (128, 72)
        ]
        try:
            until(page, "document.getElementById('waiting').textContent === '200'")
            assert page.text_content("#idle") == "and 100 more"
            assert page.locator("#requests tr").count() == 100
            assert page.text_content("#requests tr:first-child td:nth-child(3)") == "undecided"
        finally:
            live.engine.hold = False
        assert [one.result().status_code for one in asked] == [200, 200]
    until(page, "document.getElementById('finished').textContent === '200'")
    until(page, "!document.querySelector('#requests tr')")


def test_the_server_s_budget_is_set_by_its_slider(page: Any, live: LiveServer) -> None:
    page.focus("#sb")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.click("#sb-set")
    until(page, "document.getElementById('sb-note').textContent.startsWith('Set')")
    assert httpx.get(live.url + "/morph/budget").json() == {"attention_budget": 0.7}


def test_nothing_moves_for_those_who_ask_for_it(browser: Any, live: LiveServer) -> None:
    page = browser.new_page(reduced_motion="reduce")
    page.goto(live.url)
    page.wait_for_selector("#memory span")
    moving = "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).transitionDuration !== '0s'"
    assert page.evaluate(f"{moving} || getComputedStyle(e).animationName !== 'none').length") == 0
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Any, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python (extra dev)")
    if theme == "dark":
        page.click("#theme")
    run(page)
    found = axe.Axe().run(page).response["violations"]
    serious = [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found
               if one["impact"] in ("serious", "critical")]  # fmt: skip
    assert not serious, serious


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (SCREENSHOTS and SERVER), reason="makes the pictures of the docs from a running server")
def test_pictures_of_a_running_server(browser: Any) -> None:
    prompts = [
        "What is 17 * 23?",
        "Write a short poem about the sea.",
        "List three facts about otters. " + "Otters live in rivers and along coasts. " * 40,
        "Summarise this text. " + "The committee met on Tuesday and spoke about the new bridge over the river. " * 70,
        "Who wrote this? " + "It was the best of times, it was the worst of times. " * 150,
        "What was agreed? " + "Anna said that the budget is too small. Ben said that it has to do. " * 120,
    ]

    name = httpx.get(f"{SERVER}/v1/models").json()["data"][0]["id"]

    def ask(number: int) -> None:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": prompts[number % len(prompts)]}],
            "max_tokens": 80,
            "stream": True,
            "morph": {"attention_budget": (0.2, 0.5, 0.8)[number % 3]},
        }
        with httpx.stream("POST", f"{SERVER}/v1/chat/completions", json=body, timeout=300) as answer:
            answer.read()
            assert answer.status_code == 200

    shapes = {"dashboard": ("light", 1180), "dashboard-dark": ("dark", 1180), "dashboard-phone": ("light", 390)}
    with ThreadPoolExecutor(5) as pool:
        # Under this load the pictures are taken.
        load = [pool.submit(ask, number) for number in range(24)]
        for shot, (theme, width) in shapes.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
            page.goto(SERVER)
            page.wait_for_selector('#status[data-state="live"]')
            page.fill("#length", "48")
            page.click("#run")
            until(page, "!document.getElementById('run').disabled")
            picture(page, shot)
            page.close()
        for one in load:
            one.result()
