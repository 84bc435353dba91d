"""The report page: one self-contained HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from outstride.bench import result as results
from outstride.bench.report.sections import SECTIONS, Section
from outstride.bench.result import BenchResult
from outstride.errors import OutstrideError

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --box: #f7f8fa; --ink: #1c2330; --soft: #667085;
  --grid: #e4e7ec; --c0: #1668c7; --c1: #d9730d; --c2: #0e7a4f; --c3: #b42367; --c4: #6941c6;
  --c5: #0e8a9c; --c6: #946200; --c7: #596275; --exact: #1668c7; --lossy: #d9730d;
  --distribution: #0e7a4f; --on: #fff; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --box: #1b212b; --ink: #e7eaf0;
  --soft: #98a2b3; --grid: #2d3440; --c0: #6cb2ff; --c1: #ffa657; --c2: #5fd3a0; --c3: #ff8fc2;
  --c4: #b9a3ff; --c5: #5ad1e0; --c6: #e0b64a; --c7: #a9b3c4; --exact: #6cb2ff; --lossy: #ffa657;
  --distribution: #5fd3a0; --on: #14181f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 20px 64px; max-width: 860px; background: var(--paper);
  color: var(--ink); font: 15px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 16px 0 4px; } p { margin: 0 0 12px; } a { color: var(--c0); }
.lead { color: var(--soft); } section { margin: 40px 0 0; }
nav { margin: 16px 0 0; display: flex; flex-wrap: wrap; gap: 6px 16px; }
.plot { overflow-x: auto; } svg { display: block; width: 100%; min-width: 480px; height: auto;
  margin: 8px 0; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .name { font-weight: 600; } svg .small { font-size: 11px; }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; } svg .on { fill: var(--on); }
.grid { stroke: var(--grid); } .mark { stroke: var(--soft); stroke-dasharray: 5 4; }
.line { fill: none !important; stroke-width: 2.2; } .front { stroke: var(--soft);
  stroke-dasharray: 2 3; stroke-width: 1.4; } .shade { fill: var(--c0); }
.c0 { fill: var(--c0); stroke: var(--c0); } .c1 { fill: var(--c1); stroke: var(--c1); }
.c2 { fill: var(--c2); stroke: var(--c2); } .c3 { fill: var(--c3); stroke: var(--c3); }
.c4 { fill: var(--c4); stroke: var(--c4); } .c5 { fill: var(--c5); stroke: var(--c5); }
.c6 { fill: var(--c6); stroke: var(--c6); } .c7 { fill: var(--c7); stroke: var(--c7); }
.exact { fill: var(--exact); } .lossy { fill: var(--lossy); }
.distribution { fill: var(--distribution); }
.key { margin-right: 16px; } .key::before { content: ""; display: inline-block; width: 10px;
  height: 10px; border-radius: 5px; margin-right: 6px; } .key.exact::before { background:
  var(--exact); } .key.lossy::before { background: var(--lossy); }
.key.distribution::before { background: var(--distribution); }
details { margin: 8px 0 0; } summary { cursor: pointer; color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; margin: 8px 0;
  font-variant-numeric: tabular-nums; }
td:first-child { white-space: nowrap; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; } th { color: var(--soft); font-weight: 500; } .num { text-align: right; }
.about { background: var(--box); border-radius: 8px; padding: 12px 16px; margin: 20px 0 0; }
.warn { color: var(--lossy); }
"""


def read(folder: str | Path) -> dict[str, BenchResult]:
    """All results of a folder, by file name."""
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise OutstrideError(f"{folder}: no results; `outstride bench all` writes some")
    return {file.stem: results.read(file) for file in files}


def _section(section: Section) -> str:
    plots = "".join(f'<div class="plot">{plot}</div>' for plot in section.plots)
    more = f"<details><summary>All figures</summary>{section.figures}</details>"
    return (
        f'<section id="{escape(section.name)}"><h2>{escape(section.heading)}</h2>'
        f'<p class="lead">{escape(section.lead)}</p>{plots}'
        f"{more if section.figures else ''}</section>"
    )


def _machines(found: dict[str, BenchResult]) -> str:
    """The machines of the results; usually one line."""
    lines = []
    for result in found.values():
        machine, memory = result.machine, result.machine["memory"]
        parts = [machine["accelerator"] or machine["cpu"], f"{machine['cores']} cores"]
        parts += [f"{memory / 2**30:.0f} GiB"] if memory else []
        lines.append(f"{', '.join(parts)}; {machine['os']}")
    return "<br>".join(escape(line) for line in dict.fromkeys(lines))


def _short(commit: str | None) -> str:
    name, plus, changes = (commit or "unknown").partition("+")
    return name[:12] + plus + changes


BUSY = 1.5
"""Load per core from which other work must have been running: the benchmark before it leaves 1."""


def _busy(found: dict[str, BenchResult]) -> list[str]:
    """Results that were measured while other work ran on the machine."""
    lines = []
    for name, result in found.items():
        load, cores = result.settings.get("load average"), result.machine.get("cores") or 1
        if load and load[0] > BUSY * cores:
            lines.append(f"{name} (load average {load[0]:g} on {cores} cores)")
    return lines


def _about(found: dict[str, BenchResult]) -> str:
    """The box at the top: machine, date, commit, versions and warnings."""
    first = next(iter(found.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    commits = ", ".join(dict.fromkeys(_short(result.commit) for result in found.values()))
    day = min(result.started for result in found.values())[:10]
    short = [name for name, result in found.items() if not result.complete]
    warning = (
        f'<p class="warn">Interrupted and incomplete: {escape(", ".join(short))}.</p>'
        if short
        else ""
    )
    if busy := _busy(found):
        warning += (
            f'<p class="warn">Other work ran on the machine: {escape(", ".join(busy))}. Times '
            "are not to be trusted, and some engines suffer more than others.</p>"
        )
    return (
        f'<div class="about"><p>{_machines(found)}</p><p class="lead">Measured on {escape(day)} '
        f"at commit {escape(commits)}, with {escape(versions)}.</p>{warning}</div>"
    )


def _settings(found: dict[str, BenchResult]) -> str:
    rows = []
    for name, result in found.items():
        settings = ", ".join(f"{key}: {value}" for key, value in result.settings.items())
        rows.append(
            f"<tr><td>{escape(name)}</td><td>{escape(result.kind)}</td><td>{result.seconds:.0f} s"
            f"</td><td>{len(result.samples)}</td><td>{escape(settings)}</td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("file", "bench", "took", "samples", "settings"))
    return (
        '<section id="settings"><h2>Sources</h2><p class="lead">Every sample is in the '
        "files of the same folder.</p><details><summary>All settings</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div></details></section>"
    )


def html(found: dict[str, BenchResult], title: str = "Outstride, measured") -> str:
    """The whole page."""
    listed: Sequence[BenchResult] = list(found.values())
    sections = [section for part in SECTIONS for section in part(listed)]
    links = "".join(f'<a href="#{s.name}">{escape(s.heading)}</a>' for s in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        '<p class="lead">Same model, same seed, same text, fewer passes.</p>'
        f"{_about(found)}<nav>{links}</nav>"
        f"{''.join(_section(section) for section in sections)}{_settings(found)}</body></html>\n"
    )


def write(folder: str | Path, path: str | Path) -> Path:
    """Reads a folder of results and writes the page."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html(read(folder)), encoding="utf-8")
    return target
