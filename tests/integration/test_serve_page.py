"""The live page in a real browser: it loads, streams, draws, obeys the keyboard, and asks nobody but its own server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving import PATIENCE_S, Server, running_server

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser found: install one of {', '.join(NAMES)}")
# What a screen reader would read out for a control.
NAMELESS = """() => [...document.querySelectorAll("input, select, textarea, button")]
    .filter(one => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel).map(one => one.outerHTML)"""
# Contrast of text and ground, WCAG 2.2: 4.5 for text of this size.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = {};
  const all = "h1, h2, h3, p, dt, dd, th, td, caption, label, button, #answer span, sup";
  for (const node of document.querySelectorAll(all)) {
    if (!node.textContent.trim() || node.disabled || !node.checkVisibility()) continue;
    const pair = [light(rgb(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < 4.5) found[`${node.tagName}#${node.id}.${node.className}`] = contrast;
  }
  return found;
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A policy that measures the device, so that there is a curve to draw.
    folder = tmp_path_factory.mktemp("page")
    with running_server(folder, replicas=1, engine={"width": "deployment"}) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as started:
        # As root there is no sandbox to be had; all that is loaded is our own page.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, server: Server, *, key: bool = True, **settings: Any) -> Iterator[Page]:
    """The page with a key given, and at the end: no error in the console, and no request to anybody else."""
    context = browser.new_context(**settings)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    playwright.expect.set_options(timeout=PATIENCE_S * 1000)
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda one: complaints.append(one.text) if one.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    playwright.expect(page.get_by_label("API key")).to_be_visible()
    if key:
        page.get_by_label("API key").fill(server.keys["free"])
        page.get_by_role("button", name="Use").click()
        playwright.expect(page.locator("#health")).to_have_text("healthy, 1 replica")
    yield page
    # Chromium itself notes every answer that is a refusal, such as the 401 before the key is there.
    assert [text for text in complaints if not re.search(r"responded with a status of 40[01] ", text)] == []
    assert [url for url in asked if not url.startswith((server.url, "data:"))] == []
    context.close()


def generate(page: Page, prompt: str = "t1 t2 t3") -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Kind").select_option("text")
    page.get_by_label("Tokens").fill("24")
    page.get_by_role("button", name="Generate").click()


def test_it_asks_for_a_key_and_keeps_it_to_this_tab(browser: Browser, server: Server) -> None:
    with opened(browser, server, key=False) as page:
        playwright.expect(page.locator("#health")).to_have_text("an API key is needed")
        page.get_by_label("API key").fill("sk-wrong")
        page.get_by_role("button", name="Use").click()
        playwright.expect(page.locator("#health")).to_have_text("an API key is needed")
        page.get_by_label("API key").fill(server.keys["free"])
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#health")).to_have_text("healthy, 1 replica")
        assert page.evaluate("localStorage.length") == 0
        assert server.keys["free"] not in page.url


def test_it_draws_each_replicas_latency_curve_with_its_width(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        figure = page.locator("#replicas svg")
        playwright.expect(figure).to_have_attribute("aria-label", re.compile(r"up to [\d.]+ ms; present width"))
        points = figure.locator("polyline").get_attribute("points") or ""
        places = [tuple(map(float, point.split(","))) for point in points.split()]
        assert len(places) >= 3
        assert all(40 <= x <= 390 and 10 <= y <= 125 for x, y in places)
        assert [x for x, _ in places] == sorted(x for x, _ in places)


def test_the_playground_streams_what_the_engine_generates(browser: Browser, server: Server) -> None:
    from cast_ray.request import SamplingParams

    expected = server.engine.generate(["t1 t2 t3"], SamplingParams(max_tokens=24))[0]
    with opened(browser, server) as page:
        generate(page)
        playwright.expect(page.locator("#summary")).to_contain_text("24 tokens in")
        shown = page.locator("#answer span").all_text_contents()
        assert "".join(shown) == expected.text
        assert len(shown) > 1
        colours = page.eval_on_selector_all("#answer span", "all => all.map(one => one.className)")
        assert len(set(colours)) > 1
        playwright.expect(page.locator("#ttft td").first).not_to_have_text("–")
        # What the server refuses is said, and the form is ready for another.
        generate(page, "t1 " * 600)
        playwright.expect(page.locator("#answer .failure")).to_contain_text("context")
        playwright.expect(page.get_by_role("button", name="Generate")).to_be_enabled()


def test_each_rounds_tree_can_be_looked_at(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        generate(page)
        playwright.expect(page.locator("#summary")).to_contain_text("24 tokens in")
        rounds = int(re.search(r"in (\d+) rounds", page.locator("#summary").inner_text())[1])  # type: ignore[index]
        playwright.expect(page.locator("#round")).to_have_attribute("max", str(rounds))
        drawn = page.locator("#tree svg")
        playwright.expect(drawn).to_have_attribute("aria-label", re.compile(f"^Tree of round {rounds}: "))
        page.locator("#round").focus()
        page.keyboard.press("Home")
        playwright.expect(drawn).to_have_attribute("aria-label", re.compile("^Tree of round 1: "))
        found = re.search(r"round 1: (\d+) candidates", drawn.get_attribute("aria-label") or "")
        assert found is not None
        assert drawn.locator("rect").count() == int(found[1])


def test_an_answer_can_be_stopped(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        # The rest of the answer is held back, or a fast machine would have it whole before anybody can stop it.
        page.route("**/v1/completions", lambda route: None)
        generate(page)
        page.get_by_role("button", name="Stop").click()
        playwright.expect(page.locator("#answer")).to_have_text("Stopped.")
        playwright.expect(page.get_by_role("button", name="Generate")).to_be_enabled()


def test_everything_can_be_reached_and_used_with_the_keyboard(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        assert page.evaluate(NAMELESS) == []
        page.reload()  # as somebody who comes to it anew, with the key still known
        playwright.expect(page.locator("#health")).to_have_text("healthy, 1 replica")
        order = []
        for _ in range(14):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
            if order[-1] not in ("", "skip"):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline == "solid", order
        wanted = ["skip", "prompt", "kind", "max-tokens", "temperature", "seed", "send"]
        assert [one for one in order if one in wanted][: len(wanted)] == wanted
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "playground"
        page.locator("#kind").select_option("text")
        page.locator("#prompt").fill("t5")
        page.locator("#prompt").press("Control+Enter")
        playwright.expect(page.locator("#summary")).to_contain_text("tokens in")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_light_and_dark_on_a_narrow_screen(browser: Browser, server: Server, scheme: str) -> None:
    with opened(browser, server, color_scheme=scheme, viewport={"width": 320, "height": 640}) as page:
        generate(page)
        playwright.expect(page.locator("#summary")).to_contain_text("tokens in")
        assert page.evaluate(CONTRASTS) == {}
        # Nothing has to be scrolled sideways but what says so.
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(251, 251, 250)" if scheme == "light" else "rgb(22, 24, 27)")
