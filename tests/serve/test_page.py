"""The page in a real browser, against servers as users start them."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from outstride.serve.settings import PAGE, PAGE_FILES
from tests.serve import tiny
from tests.serve.running import CAP, Running, start

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
browser_needed = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed (Debian: apt install chromium)"
)
TIMEOUT = 1000 * CAP
"""Milliseconds after which the browser gives up waiting: more than a busy machine needs."""
KEY = "sesame"


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_masked(tmp_path_factory.mktemp("served") / "masked")


@pytest.fixture(scope="module")
def site(masked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("log") / "site.log"
    with start(
        masked, log, "--max-sequences", "4", "--queue", "4", "--pages", "1024", slow=True
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Visitor:
    """A browser window, and everything that went wrong in it."""

    def __init__(self, browser: Any, server: Running, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(TIMEOUT)
        self.page = self.context.new_page()
        self.server = server
        self.faults: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.server.url, "data:")):
            self.elsewhere.append(request.url)

    def visit(self, fragment: str = "") -> Any:
        self.page.goto(f"{self.server.url}/{fragment}")
        self.page.wait_for_selector("#server[data-state=on]")
        return self.page

    def race(self) -> None:
        """Races to the end, whatever it is."""
        self.page.click("#race")
        self.page.wait_for_selector("#race:enabled")

    def texts(self) -> list[str]:
        found: list[str] = self.page.locator(".pane .text").all_text_contents()
        return found

    def figures(self, name: str) -> list[float]:
        return [float(f) for f in self.page.locator(f"[data-of={name}]").all_text_contents()]


@pytest.fixture
def visitor(browser: Any, site: Running) -> Iterator[Visitor]:
    """A browser window without errors in its console and without requests to other servers."""
    found = Visitor(browser, site)
    yield found
    found.context.close()
    assert not found.faults
    assert not found.elsewhere


# --- without a browser ------------------------------------------------------------------------------


def test_files_are_served_with_a_strict_policy(site: Running) -> None:
    for name in ("", *PAGE_FILES):
        found = httpx.get(f"{site.url}/{name}", timeout=CAP)
        assert found.status_code == 200
        assert found.headers["content-type"].startswith(PAGE_FILES[name or "index.html"])
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert httpx.get(f"{site.url}/settings.py", timeout=CAP).status_code == 404
    assert {path.name for path in PAGE.iterdir()} == set(PAGE_FILES)


def test_nothing_is_inline_and_nothing_comes_from_outside() -> None:
    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            assert tag != "style"
            assert "style" not in given
            assert not [name for name in given if name.startswith("on")]
            assert tag != "script" or given.get("src")

    Reader().feed((PAGE / "index.html").read_text(encoding="utf-8"))
    for name in PAGE_FILES:
        text = (PAGE / name).read_text(encoding="utf-8")
        links = set(re.findall(r"""https?://[^\s"'<>)]+""", text))
        assert links <= {"http://www.w3.org/2000/svg"}, name
        assert "innerHTML" not in text  # answers are text, never markup


# --- races ------------------------------------------------------------------------------------------


@browser_needed
@pytest.mark.parametrize("fragment", ["#temperature=0", "#temperature=0.8&seed=11&order=turns"])
def test_a_race_runs_to_the_end_and_both_texts_are_equal(visitor: Visitor, fragment: str) -> None:
    page = visitor.visit(f"{fragment}&method=ngram&max_tokens=96&o.shortest=1")
    page.fill("#prompt", "say the thing in the box")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#same[data-equal]")
    left, right = visitor.texts()
    assert left == right
    assert left
    assert page.get_attribute("#same", "data-equal") == "true"
    assert "token for token" in page.inner_text("#same")
    tokens, passes = visitor.figures("tokens"), visitor.figures("passes")
    assert tokens[0] == tokens[1] == passes[0]
    assert passes[1] <= passes[0]
    for pane in (1, 2):
        bars = page.locator(f".pane:nth-child({pane}) .bar")
        assert bars.count() == passes[pane - 1]
    message = page.inner_text("#status")
    assert message.startswith("Finished.")
    assert "passes with ngram" in message
    assert "equal, token for token" in message


@browser_needed
def test_a_wrong_token_is_noticed(visitor: Visitor) -> None:
    """An exact method with another token than plain is a fault, and the page says so."""
    page = visitor.visit("#method=ngram&max_tokens=24")

    def tamper(route: Any) -> None:
        if route.request.post_data_json["outstride"]["method"] == "plain":
            route.continue_()
            return
        answer = route.fetch()
        tokens = list(re.finditer(r'"trace":\[\{"token":(\d+)', answer.text()))
        start, end = tokens[len(tokens) // 2].span(1)
        changed = f"{answer.text()[:start]}{(int(tokens[0][1]) + 1) % 200}{answer.text()[end:]}"
        route.fulfill(response=answer, body=changed)

    page.route("**/v1/chat/completions", tamper)
    visitor.race()
    assert page.get_attribute("#same", "data-equal") == "false"
    assert "this is a fault" in page.inner_text("#same")
    assert page.locator(".differs").count() == 2


CODE = "Before.\n```python\nclass Stack:\n    def push(self, item):\n```\nAfter."


def answer(route: Any, seconds: float, passes: int) -> None:
    """Answers a chat with `CODE`, a token per word or blank, after a time."""
    time.sleep(seconds)
    tokens = re.findall(r"\s+|``|[^\s`]+|`", CODE)
    chunks: list[Any] = []
    for i, text in enumerate(tokens):
        row = {"token": i, "text": text, "pass": i + 1, "source": "", "kind": "plain"}
        end = "length" if i == len(tokens) - 1 else None
        chunks.append({"delta": {"content": text}, "outstride": {"trace": [row]}})
        chunks[-1] |= {"index": 0, "finish_reason": end}
    usage = {"outstride": {"passes": passes, "proposed": 8, "accepted": 2}}
    events = [{"choices": [chunk]} for chunk in chunks] + [{"choices": [], "usage": usage}]
    lines = [*map(json.dumps, events), "[DONE]"]
    headers = {"content-type": "text/event-stream"}
    route.fulfill(headers=headers, body="".join(f"data: {line}\n\n" for line in lines))


@browser_needed
@pytest.mark.parametrize("wins", [True, False])
def test_a_loss_is_printed_smaller_than_a_win(visitor: Visitor, wins: bool) -> None:
    page = visitor.visit("#method=ngram&order=turns")

    def race(route: Any) -> None:
        plain = route.request.post_data_json["outstride"]["method"] == "plain"
        answer(route, 0.5 if plain is wins else 0.0, 20 if plain is wins else 10)

    page.route("**/v1/chat/completions", race)
    visitor.race()
    sizes = page.evaluate("""() => ["ratio", "speed", "same"].map((id) =>
        parseFloat(getComputedStyle(document.getElementById(id)).fontSize))""")
    large = [size > 1.5 * sizes[2] for size in sizes[:2]]
    assert large == [wins, wins]
    assert page.inner_text("#ratio") == "2.00×"
    assert page.inner_text("#ratio-text").startswith("fewer" if wins else "more")
    assert page.inner_text("#speed-text").startswith("faster" if wins else "slower")
    assert page.locator("[data-of=acceptance]").all_text_contents() == ["25%", "25%"]


@browser_needed
def test_code_is_monospaced_and_no_line_is_clipped(visitor: Visitor) -> None:
    page = visitor.visit("#method=ngram")
    page.route("**/v1/chat/completions", lambda route: answer(route, 0.0, 10))
    visitor.race()
    code = "".join(page.locator(".pane:first-child .token.code").all_text_contents())
    assert code.strip("`\n ") == CODE.split("```")[1].strip()
    families = page.evaluate("""() => [...document.querySelectorAll(".pane:first-child .token")]
        .map((token) => [token.classList.contains("code"), getComputedStyle(token).fontFamily])""")
    assert all(("monospace" in family) == is_code for is_code, family in families)
    clipped = page.evaluate("""() => [...document.querySelectorAll(".pane .text")]
        .filter((e) => e.scrollHeight > e.clientHeight || e.scrollWidth > e.clientWidth).length""")
    assert clipped == 0


@browser_needed
def test_the_graph_of_a_pass_opens(visitor: Visitor) -> None:
    page = visitor.visit("#method=recycle&max_tokens=96")
    visitor.race()
    drafted = page.locator(".pane:nth-child(2) .token.d0")
    assert drafted.count(), "no draft was accepted: the test needs another prompt"
    number = drafted.first.get_attribute("data-pass")
    same = page.locator(f".pane:nth-child(2) .token[data-pass='{number}']").count()
    drafted.first.click()
    assert page.is_visible("#pass")
    summary = page.inner_text("#pass-summary")
    drafts, accepted = map(int, re.findall(r"(\d+) tokens? drafted, (\d+) accepted", summary)[0])
    nodes = page.locator("#pass-graph .node")
    assert nodes.count() >= drafts + 1  # the given token, and perhaps the model's own
    assert page.locator("#pass-graph .node.rejected").count() == drafts - accepted
    assert page.locator("#pass-graph .edge.accepted").count() == same
    title = page.inner_text("#pass-title")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#pass-title") != title
    page.keyboard.press("Escape")
    assert not page.is_visible("#pass")
    # The same by keyboard alone, from the chart.
    page.focus(".pane:nth-child(2) .chart")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute(".pane:nth-child(2) .chart", "aria-valuenow") == "2"
    page.keyboard.press("Enter")
    assert page.inner_text("#pass-title").startswith("Pass 2 of")


@browser_needed
def test_a_canvas_fills_in(visitor: Visitor) -> None:
    page = visitor.visit("#method=steps&o.count=2&max_tokens=480")
    page.evaluate("""() => new MutationObserver(() => {
        const open = document.querySelectorAll(".pane:nth-child(2) .mask").length;
        const done = document.querySelectorAll(".pane:nth-child(2) [data-pass].token").length;
        if (open && done) (window.seen ??= []).push(open + done);
    }).observe(document.querySelector("#panes"), {childList: true, subtree: true})""")
    visitor.race()
    assert page.evaluate("window.seen?.length") > 0, "masks and tokens were never seen together"
    assert page.locator(".pane:nth-child(2) .mask").count() == 0
    assert page.get_attribute("#same", "data-equal") == "false"
    assert "not that of plain decoding" in page.inner_text("#same")
    shades = page.evaluate("""() => [...document.querySelectorAll(".pane:nth-child(2) .token")]
        .map((token) => [...token.classList].find((name) => /^s\\d$/.test(name)))""")
    assert len(set(shades)) > 2
    assert None not in shades
    assert visitor.figures("passes")[1] < visitor.figures("tokens")[1]
    page.focus(".pane:nth-child(2) .chart")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert page.locator("#pass-graph .cell.now").count() == 2
    assert page.locator("#pass-graph .cell.before").count() == 0


@browser_needed
@pytest.mark.parametrize("order", ["together", "turns"])
def test_stop_ends_both(visitor: Visitor, site: Running, order: str) -> None:
    page = visitor.visit(f"#method=ngram&max_tokens=3000&order={order}")
    # At the first token, by the page itself: a fast model may be done before a message comes through.
    page.evaluate("""() => new MutationObserver((_, observer) => {
        if (!document.querySelector(".pane .token")) return;
        observer.disconnect();
        document.querySelector("#stop").click();
    }).observe(document.querySelector("#panes"), {childList: true, subtree: true})""")
    page.click("#race")
    page.wait_for_selector("#race:enabled")
    assert page.locator(".pane .state").all_text_contents() == ["stopped", "stopped"]
    assert page.inner_text("#status").startswith("Stopped")
    assert visitor.figures("tokens")[0] < 3000
    site.until("outstride_num_requests_in_flight", 0)
    page.evaluate("document.querySelector('#max_tokens').value = '8'")
    visitor.race()
    assert page.inner_text("#status").startswith("Finished.")


# --- settings ---------------------------------------------------------------------------------------


@browser_needed
def test_a_link_holds_the_settings(visitor: Visitor) -> None:
    page = visitor.visit("#against=ngram&method=recycle")
    page.click("summary")
    values = {"prompt": "über & #? +1", "temperature": "0.7", "top_p": "0.9", "max_tokens": "12"}
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.fill("#option-depth", "3")
    page.check("[value=turns]")
    visitor.race()
    link = page.url
    seed = re.search(r"seed=(\d+)", link)
    assert seed, "the random seed is part of the link"
    before = visitor.texts()
    page.goto("about:blank")
    visitor.page.goto(link)
    page.wait_for_selector("#server[data-state=on]")
    for name, value in {**values, "against": "ngram", "method": "recycle"}.items():
        assert page.input_value(f"#{name}") == value
    assert page.input_value("#option-depth") == "3"
    assert page.is_checked("[value=turns]")
    visitor.race()
    assert visitor.texts() == before
    visitor.elsewhere.clear()  # about:blank


CONTRAST = """() => {
    const light = (css) => css.match(/[\\d.]+/g).slice(0, 3).map(Number).map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => {
        const css = getComputedStyle(e).backgroundColor;
        return /, 0\\)$/.test(css) ? ground(e.parentElement) : css;
    };
    const text = document.querySelector(".pane .text");
    for (const kind of "d0 d1 d2 d3 d4 d5 bonus given s0 s1 s2 s3 s4 s5".split(" ")) {
        const token = document.createElement("span");
        token.className = `token ${kind}`;
        token.textContent = kind;
        text.append(token);
    }
    document.querySelector("#alert").hidden = false;
    document.querySelector("#alert").textContent = "words";
    const names = ".token, p, label, small, dt, dd, h1, h2, li, button, legend, summary, #alert";
    const parts = document.querySelectorAll(names);
    return [...parts].filter((e) => e.offsetParent && !e.disabled).map((e) => {
        const [a, b] = [getComputedStyle(e).color, ground(e)].map(light).sort((x, y) => y - x);
        return [`${e.tagName}.${e.className} ${e.textContent.slice(0, 20)}`, (a + 0.05) / (b + 0.05)];
    }).filter(([, ratio]) => ratio < 4.5);
}"""


@browser_needed
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(browser: Any, site: Running, scheme: str) -> None:
    """The contrast that the web's accessibility guidelines ask for, for text of ordinary size."""
    visitor = Visitor(browser, site, color_scheme=scheme)
    page = visitor.visit("#method=ngram&max_tokens=8&order=turns")
    page.click("summary")
    visitor.race()
    assert page.evaluate(CONTRAST) == []
    visitor.context.close()


@browser_needed
def test_colours_controls_and_narrow_screens(browser: Any, site: Running) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}
    visitor = Visitor(browser, site, **options, has_touch=True)
    page = visitor.visit("#method=ngram&max_tokens=40")
    page.click("summary")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.select_option("#theme", "light")
    assert page.evaluate(paper) != dark
    page.reload()
    page.wait_for_selector("#server[data-state=on]")
    assert page.input_value("#theme") == "light"
    visitor.race()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    nameless = page.evaluate("""() => [...document.querySelectorAll("input, select, textarea")]
        .filter((control) => !control.labels.length).map((control) => control.id)""")
    assert nameless == []
    small = page.evaluate("""() => [...document.querySelectorAll("button, select")]
        .filter((e) => e.offsetParent && e.getBoundingClientRect().height < 32).map((e) => e.id)""")
    assert small == []
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    visitor.context.close()
    assert not visitor.faults


# --- what goes wrong --------------------------------------------------------------------------------


@browser_needed
def test_refusals_are_shown_in_words(browser: Any, site: Running) -> None:
    visitor = Visitor(browser, site)
    page = visitor.visit("#method=nonsense&max_tokens=8")
    assert "no method “nonsense”" in page.inner_text("#alert")
    page.select_option("#method", "draft")
    page.fill("#option-model", "nobody")
    visitor.race()
    assert "no draft model 'nobody'" in page.inner_text("#alert")
    page.select_option("#method", "ngram")
    busy = {"error": {"message": "full", "type": "rate_limit_error"}}

    def refuse(route: Any) -> None:
        headers = {"retry-after": "7", "content-type": "application/json"}
        route.fulfill(status=429, headers=headers, body=json.dumps(busy))

    page.route("**/v1/chat/completions", refuse)
    visitor.race()
    assert "busy" in page.inner_text("#alert")
    assert "7 seconds" in page.inner_text("#alert")
    page.unroute("**/v1/chat/completions")

    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == f"Bearer {KEY}":
            route.continue_()
        else:
            route.fulfill(status=401, body="{}", headers={"content-type": "application/json"})

    page.route("**/v1/**", guard)
    visitor.race()
    assert "API key" in page.inner_text("#alert")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#same[data-equal=true]")
    assert not page.is_visible("#alert")
    assert page.evaluate("JSON.stringify(localStorage)").find(KEY) == -1
    assert KEY not in page.url
    visitor.context.close()
    assert all("Failed to load resource" in fault for fault in visitor.faults)


@browser_needed
def test_a_dead_server_is_reported(
    browser: Any, masked: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It has an API key, too, which the browser asks for before it shows the page."""
    log = tmp_path_factory.mktemp("log") / "dying.log"
    with start(masked, log, "--api-key", KEY, "--pages", "1024", key=KEY, slow=True) as server:
        entry = {"username": "", "password": KEY}
        visitor = Visitor(browser, server, http_credentials=entry)
        page = visitor.visit("#method=ngram&max_tokens=16")
        visitor.race()
        assert page.get_attribute("#same", "data-equal") == "true"
        page.evaluate("document.querySelector('#max_tokens').value = '3500'")
        page.click("#race")
        for pane in (1, 2):
            page.wait_for_selector(f".pane:nth-child({pane}) .token")
        server.process.kill()
        page.wait_for_selector("#race:enabled")
        assert "broke off" in page.inner_text("#alert")
        assert page.locator(".pane .state").all_text_contents() == ["failed", "failed"]
        assert min(visitor.figures("tokens")) > 0, "the tokens so far stay"
        visitor.race()
        assert "does not answer" in page.inner_text("#alert")
        assert page.get_attribute("#server", "data-state") == "off"
        visitor.context.close()
        assert all("Failed to load resource" in fault for fault in visitor.faults)
