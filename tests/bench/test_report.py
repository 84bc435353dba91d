"""The page: complete, self-contained, and it looks right in a real browser, light and dark."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import result
from outstride.bench.report import charts, page, sections
from outstride.bench.report.charts import Axis, Point, front, steps
from outstride.bench.result import BenchResult
from outstride.errors import OutstrideError
from tests.cli.shell import Shell

HOSTILE = "<script>alert('x')</script>"


def line(method: str, group: str, **values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "batch": 1,
        "temperature": 0.0,
        "warm": False,
        "prompts": 4,
        "equal": 4,
    }
    usual |= {"tokens_per_pass": 2.0, "nodes_per_pass": 5.0, "tokens_per_second": 100.0}
    return {"method": method, "group": group, **usual, "ratio": 1.4, "bound": 1.2, **values}


def score(method: str, exactness: str, right: int, passes: float) -> dict[str, Any]:
    return {
        "method": method,
        "exactness": exactness,
        "task": "gsm8k",
        "asked": 20,
        "right": right,
        "score": 5.0 * right,
        "interval": [1.0, 30.0],
        "tokens_per_pass": passes,
        "seconds": 3.0,
    }


def summaries() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Settings and summary of a result of each kind, as the benches write them."""
    decoded = [
        *(line("plain", g, tokens_per_pass=1.0, ratio=1.0) for g in ("chat", "code", "all")),
        *(line("auto", group) for group in ("chat", "code", "all")),
        *(line(HOSTILE, group, tokens_per_pass=1.3) for group in ("chat", "code", "all")),
        line("plain", "mixed", batch=8, ratio=1.0),
        line("auto", "mixed", batch=8, ratio=0.9),
    ]
    policy = {"fewer": 2.0, "equal": 3, "cases": 4}
    rate: dict[str, Any] = {"requests": 5, "failed": 0, "good": 4, "tokens_per_second": 70.0}
    rate |= {"ttft_p50": 0.05, "ttft_p99": 0.2, "itl_p50": 0.01, "itl_p99": None}
    return {
        "peers": (
            {"cached": 128, "limit": 2, "tokens": 8, "threads": 2},
            {
                "milliseconds": {"ours": {"1": 6.0, "8": 9.0}, "theirs": {"1": 8.0, "8": 40.0}},
                "tokens_per_second": {"ours": {"1": 150.0}, "theirs": {"1": 100.0}},
                "settings": {"ours": {"method": "plain"}, "theirs": {"version": "1"}},
                "skipped": {"vllm": "not here"},
            },
        ),
        "decode": ({"methods": ["auto", "other"]}, {"lines": decoded}),
        "parallel": (
            {"model": "parallel-full"},
            {
                "policies": [
                    {"policy": "steps", "exactness": "exact", "match": 99.0, **policy}
                    | {"tokens_per_pass": 1.0},
                    {"policy": "factor", "exactness": "lossy", "match": 95.0, **policy}
                    | {"tokens_per_pass": 4.0},
                ]
            },
        ),
        "quality": (
            {},
            {"scores": [score("plain", "exact", 5, 1.0), score("typical", "lossy", 4, 2.0)]},
        ),
        "serve": (
            {},
            {
                "arrivals": {
                    "limits": {"ttft": 2.0, "itl": 0.2},
                    "rates": [{**rate, "rate": r, "goodput": 0.9 * r} for r in (1.0, 2.0)],
                }
            },
        ),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind, (settings, summary) in summaries().items():
        result.write(
            BenchResult(kind, settings).finish([{"x": 1}], summary), tmp_path / f"{kind}.json"
        )
    row = {"name": "pass", "ours": 1.0, "theirs": 2.0, "unit": "ms", "ratio": 0.5, "met": True}
    row |= {"bound": "ratio <= 0.85", "other": "llama.cpp"}
    against = BenchResult("against", {})
    against.enter([row], {"met": 1, "bounds": 1})
    result.write(against, tmp_path / "against.json")
    return tmp_path


class Links(HTMLParser):
    """Everything that a page refers to, and whether its tags are balanced."""

    EMPTY = frozenset({"meta", "link", "br", "circle", "line", "rect", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action"):
                self.found.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else(folder: Path) -> None:
    text = page.html(page.read(folder))
    parser = Links()
    parser.feed(text)
    assert parser.open == []
    assert len(set(parser.ids)) == len(parser.ids)
    assert all(link in ("data:,", *(f"#{name}" for name in parser.ids)) for link in parser.found)
    assert not re.search(r"https?://|<script|@import|url\(", text)
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text


def test_every_section_has_its_plot(folder: Path) -> None:
    text = page.html(page.read(folder))
    for name in ("passes", "engines", "tasks", "batches", "parallel", "quality-gsm8k", "latency"):
        section = re.search(rf'<section id="{name}">.*?</section>', text, re.DOTALL)
        assert section, name
        assert "<svg" in section[0], name
        assert "<table" in section[0], name
    assert "1 of 1 bounds are met" in text
    assert "incomplete: against" in text
    assert "vllm (left out)" in text


def test_without_peers_our_own_passes_are_drawn() -> None:
    summary = {"milliseconds": {"nodes": {"1": 6.0, "8": 9.0}}}
    found = BenchResult("step", {"cached": 128}).finish([{"x": 1}], summary)
    text = page.html({"step": found})
    assert '<section id="passes">' in text
    assert "outstride: 9 at 8" in text


def test_different_answers_are_said(folder: Path) -> None:
    settings, summary = summaries()["decode"]
    summary["lines"][3]["equal"] = 3
    result.write(BenchResult("decode", settings).finish([], summary), folder / "decode.json")
    assert "1 answers differ from those of plain" in page.html(page.read(folder))


def test_a_curve_is_of_one_run() -> None:
    """A run with other prompts and one batch size has no place in it."""
    settings, summary = summaries()["decode"]
    wide = BenchResult("decode", settings).finish([], summary)
    lines = [{**line, "ratio": 9.87} for line in summary["lines"] if line["batch"] == 1]
    single = BenchResult("decode", settings).finish([], {"lines": lines})
    [section] = sections.batches([wide, single])
    assert section.plots == next(sections.batches([wide])).plots
    assert "9.87" not in section.figures


@pytest.mark.parametrize(("load", "said"), [(1.9, False), (6.2, True)])
def test_a_busy_machine_is_said(load: float, said: bool) -> None:
    found = BenchResult("step", {"load average": [load, 1.0, 1.0]}).finish([], {})
    found.machine["cores"] = 2
    text = page.html({"step": found})
    assert (f"step (load average {load:g} on 2 cores)" in text) is said


def test_little_or_nothing_is_no_error(tmp_path: Path) -> None:
    """A run that was cut short at once still has a page."""
    empty: dict[str, dict[str, Any]] = {"peers": {"skipped": {}}, "decode": {"lines": []}}
    for kind in ("peers", "decode", "parallel", "quality", "serve", "against", "step"):
        found = BenchResult(kind, {"methods": [], "model": "m"})
        found.enter([], empty.get(kind, {}))
        result.write(found, tmp_path / f"{kind}.json")
    assert "incomplete" in page.html(page.read(tmp_path))
    with pytest.raises(OutstrideError, match="no results"):
        page.read(tmp_path / "nowhere")


# --- plots ----------------------------------------------------------------------------------------


def test_round_steps() -> None:
    assert steps(0, 10) == [0, 2, 4, 6, 8, 10]
    assert steps(0, 1.3) == [0, 0.5, 1.0]
    assert steps(70, 100) == [70, 80, 90, 100]
    assert steps(4, 300, log=True) == [5, 10, 20, 50, 100, 200]


def test_axes() -> None:
    assert Axis(0, 10, 100, 200).at(5) == 150
    assert Axis(1, 100, 0, 200, log=True).at(10) == pytest.approx(100)


def test_the_front_is_what_nothing_beats() -> None:
    points = [
        Point(n, x, y, "k") for n, x, y in (("a", 1, 9), ("b", 2, 8), ("c", 2, 7), ("d", 3, 5))
    ]
    points += [Point("e", 1.5, 8, "k"), Point("f", 2.5, 5, "k")]
    assert [point.name for point in front(points)] == ["a", "b", "d"]
    assert front(points[:1]) == points[:1]


def test_names_do_not_cover_each_other() -> None:
    plot = charts.Plot("x", "y", (0, 1), (0, 1))
    before = len(plot.parts)
    plot.names([(0.5, str(i), "c0") for i in range(6)])
    places = [float(y) for part in plot.parts[before:] for y in re.findall(r' y="([\d.]+)"', part)]
    assert all(b - a >= 14.9 for a, b in pairwise(places))


# --- the command ----------------------------------------------------------------------------------


def test_the_command(shell: Shell, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    ran = shell("bench", "report", str(folder), "--out", str(out))
    assert (ran.code, ran.last) == (0, str(out))
    assert out.read_text().startswith("<!doctype html>")
    assert shell("bench", "report", str(folder)).code == 0
    assert (folder / "report.html").exists()
    assert shell("bench", "report", str(tmp_path / "none")).code == 1


# --- in a browser ---------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (Debian: apt install chromium)")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def test_it_opens_offline(folder: Path, browser: Any) -> None:
    path = page.write(folder, folder / "report.html")
    papers = set()
    for scheme, width in (("light", 960), ("dark", 960), ("light", 400)):
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True
        )
        shown = context.new_page()
        asked, said = list[str](), list[str]()
        shown.on("request", lambda request, asked=asked: asked.append(request.url))
        shown.on("console", lambda message, said=said: said.append(message.text))
        shown.goto(path.as_uri())
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
        assert said == []
        assert shown.locator("svg").count() >= 8
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        for text in shown.locator("svg text").all()[:200]:
            assert text.bounding_box()["width"] > 0
        papers.add(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
        outside = shown.evaluate(
            """() => [...document.querySelectorAll('svg')].flatMap(svg => {
                 const box = svg.getBoundingClientRect();
                 return [...svg.querySelectorAll('text')].filter(t => {
                   const b = t.getBoundingClientRect();
                   return b.left < box.left - 1 || b.right > box.right + 1
                     || b.top < box.top - 1 || b.bottom > box.bottom + 1; }).map(t => t.textContent)
               })"""
        )
        assert outside == [], "words that stick out of their plot are cut off"
        shown.locator("summary").first.click()
        assert shown.locator("details[open] table").first.is_visible()
        context.close()
    assert len(papers) == 2, "light and dark"
