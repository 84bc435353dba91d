"""The sections of the page: each plots the results of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outstride.bench.report import charts
from outstride.bench.report.charts import Point, table
from outstride.bench.result import BenchResult

ALL = "all"


class Section:
    """A heading, a lead sentence, plots, and a table with the figures."""

    def __init__(
        self, name: str, heading: str, lead: str, plots: Sequence[str], figures: str
    ) -> None:
        self.name, self.heading, self.lead = name, heading, lead
        self.plots, self.figures = plots, figures


def _of(found: Sequence[BenchResult], kind: str) -> list[BenchResult]:
    return [result for result in found if result.kind == kind]


def _passes(result: BenchResult, passes: dict[str, dict[str, float]]) -> Iterator[Section]:
    """Cost curves of one run."""
    series = {
        name: sorted((float(nodes), value) for nodes, value in mine.items())
        for name, mine in passes.items()
        if mine
    }
    if series:
        yield Section(
            "passes",
            "What a pass costs",
            "Milliseconds of one pass over several tokens after "
            f"{result.settings.get('cached')} cached ones. A draft pays where the curve is flat. "
            "Lower is better.",
            [
                charts.lines(
                    series,
                    title="Milliseconds of a pass against its tokens",
                    x_label="tokens in the pass",
                    y_label="milliseconds",
                    x_log=True,
                    y_log=True,
                    palette=list(result.summary.get("settings", ())),
                )
            ],
            _pivot(passes, "tokens", 2),
        )


def peers(found: Sequence[BenchResult]) -> Iterator[Section]:
    """Cost of a pass and speed of all engines. Without other engines, only our own passes."""
    if not _of(found, "peers"):
        for result in _of(found, "step")[:1]:
            ours = result.summary.get("milliseconds", {}).get("nodes", {})
            yield from _passes(result, {"outstride": ours})
    for result in _of(found, "peers"):
        yield from _passes(result, result.summary.get("milliseconds", {}))
        engines = list(result.summary.get("settings", ()))
        rates = result.summary.get("tokens_per_second", {})
        if rates:
            batches = sorted({int(b) for mine in rates.values() for b in mine})
            groups = {
                f"{batch} request{'' if batch == 1 else 's'} at a time": {
                    name: mine[str(batch)] for name, mine in rates.items() if str(batch) in mine
                }
                for batch in batches
            }
            settings = result.summary.get("settings", {})
            labels = [
                [name, ", ".join(f"{key} {value}" for key, value in mine.items())]
                for name, mine in settings.items()
            ]
            labels += [[f"{n} (left out)", why] for n, why in result.summary["skipped"].items()]
            yield Section(
                "engines",
                "Comparison with other engines",
                f"Tokens per second, prompts included: the same {result.settings.get('limit')} "
                f"prompts, {result.settings.get('tokens')} tokens for each answer, greedy, "
                f"{result.settings.get('threads')} threads each, in turns. Higher is better.",
                [
                    charts.bars(
                        groups, title="Tokens per second", unit="tokens per second", palette=engines
                    )
                ],
                _pivot(rates, "at a time", 1)
                + table(["engine", "settings"], labels, text_columns=2),
            )


def _pivot(found: dict[str, dict[str, float]], what: str, digits: int) -> str:
    columns = sorted({int(key) for mine in found.values() for key in mine})
    rows = [
        [name, *(f"{mine[str(c)]:.{digits}f}" if str(c) in mine else "" for c in columns)]
        for name, mine in found.items()
    ]
    return table([what, *map(str, columns)], rows)


def _lines(found: Sequence[BenchResult]) -> list[dict[str, Any]]:
    return [
        line
        for result in _of(found, "decode")
        for line in result.summary.get("lines", ())
        if not line["warm"]
    ]


def _overall(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines over all tasks; for settings with a single task, the lines of that task."""
    found = []
    for setting in dict.fromkeys((line["batch"], line["temperature"]) for line in lines):
        mine = [line for line in lines if (line["batch"], line["temperature"]) == setting]
        whole = [line for line in mine if line["group"] == ALL]
        found += whole or mine
    return found


def tasks(found: Sequence[BenchResult]) -> Iterator[Section]:
    """Tokens per pass by method and task, one request at a time, of the run with the most methods."""
    largest = max(_of(found, "decode"), key=lambda r: len(r.settings["methods"]), default=None)
    for result in [largest] if largest else []:
        lines = [
            line
            for line in result.summary.get("lines", ())
            if (line["batch"], line["temperature"], line["warm"]) == (1, 0.0, False)
        ]
        groups = list(dict.fromkeys(line["group"] for line in lines if line["group"] != ALL))
        if len(groups) < 2:
            continue
        rows: dict[str, dict[str, float]] = {}
        for line in lines:
            rows.setdefault(line["method"], {})[line["group"]] = line["tokens_per_pass"]
        rows = dict(sorted(rows.items(), key=lambda row: -row[1].get(ALL, 0.0)))
        best = max(value for mine in rows.values() for value in mine.values())
        wrong = sum(line["prompts"] - line["equal"] for line in lines if line["group"] != ALL)
        kept = "Every answer was token for token that of plain decoding."
        if wrong:
            kept = f"{wrong} answers differ from those of plain decoding."
        yield Section(
            "tasks",
            "Tokens per pass, by task",
            "How many tokens a pass of the model yields: one with plain decoding, more where the "
            f"text is predictable. {kept}",
            [charts.shaded(rows, [*groups, ALL], title="Tokens per pass by task", best=best)],
            _decode_table(lines),
        )


def _decode_table(lines: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            line["method"],
            line["group"],
            f"{line['batch']}",
            f"{line['temperature']:g}",
            f"{line['equal']}/{line['prompts']}",
            f"{line['tokens_per_pass']:.2f}",
            f"{line['nodes_per_pass']:.1f}",
            f"{line['tokens_per_second']:.1f}",
            f"{line['ratio']:.2f}",
            f"{line['bound']:.2f}",
        ]
        for line in lines
    ]
    head = ["method", "task", "batch", "temperature", "equal", "tokens/pass", "nodes/pass"]
    return table([*head, "tok/s", "x plain", "at least"], rows, text_columns=2)


def batches(found: Sequence[BenchResult]) -> Iterator[Section]:
    """Speed-up over plain decoding by batch size.

    A curve belongs to one run: other runs have other prompts.
    """
    wide = [
        result
        for result in _of(found, "decode")
        if len({line["batch"] for line in result.summary.get("lines", ())}) > 1
    ]
    lines = _overall(_lines(wide))
    by_temperature: dict[float, dict[str, dict[float, float]]] = {}
    for line in lines:
        methods = by_temperature.setdefault(line["temperature"], {})
        methods.setdefault(line["method"], {})[float(line["batch"])] = line["ratio"]
    plots = []
    for temperature, methods in sorted(by_temperature.items()):
        series = {
            name: sorted(points.items())
            for name, points in methods.items()
            if len(points) > 1 and set(points.values()) != {1.0}
        }
        if series:
            label = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            plots.append(
                f"<h3>{label}</h3>"
                + charts.lines(
                    series,
                    title=f"Speed against plain by batch size, {label}",
                    x_label="requests at a time",
                    y_label="times the speed of plain",
                    x_log=True,
                    mark=1.0,
                )
            )
    if plots:
        some = [line for line in lines if line["ratio"] != 1.0]
        yield Section(
            "batches",
            "Speed-up against batch size",
            "Time of plain decoding against time of each method on the same prompts in the same "
            "run, mean over tasks. The broken line is plain decoding. Higher is better.",
            plots,
            _decode_table(some),
        )


def quality(found: Sequence[BenchResult]) -> Iterator[Section]:
    """Quality of answers against tokens per pass."""
    for result in _of(found, "parallel"):
        rows = result.summary.get("policies", ())
        points = [
            Point(r["policy"], r["tokens_per_pass"], r["match"], r["exactness"]) for r in rows
        ]
        if points:
            cells = [
                [
                    row["policy"],
                    row["exactness"],
                    f"{row['match']:.1f}",
                    f"{row['tokens_per_pass']:.2f}",
                    f"{row['fewer']:.2f}",
                    f"{row['equal']}/{row['cases']}",
                ]
                for row in rows
            ]
            head = ["policy", "exactness", "exact match, %", "tokens/pass", "x fewer", "equal"]
            yield _scatter("parallel", f"Quality against speed: {result.settings['model']}", points,
                "Policies that settle several tokens per pass, on tasks that separate them.",
                "exact match, %", table(head, cells, text_columns=2))  # fmt: skip
    for result in _of(found, "quality"):
        scores = result.summary.get("scores", ())
        for task in dict.fromkeys(score["task"] for score in scores):
            mine = [score for score in scores if score["task"] == task]
            points = [
                Point(s["method"], s["tokens_per_pass"], s["score"], s["exactness"]) for s in mine
            ]
            cells = [
                [
                    s["method"],
                    s["exactness"],
                    f"{s['right']}/{s['asked']}",
                    f"{s['score']:.1f}",
                    f"{s['interval'][0]:.1f} to {s['interval'][1]:.1f}",
                    f"{s['tokens_per_pass']:.2f}",
                    f"{s['seconds']:.1f}",
                ]
                for s in mine
            ]
            head = ["method", "exactness", "right", "score, %", "95% interval", "tokens/pass", "s"]
            yield _scatter(f"quality-{task}", f"Quality against speed: {task}", points,
                f"Right answers to {mine[0]['asked']} questions.", "score, %",
                table(head, cells, text_columns=2))  # fmt: skip


def _scatter(
    name: str, heading: str, points: Sequence[Point], lead: str, label: str, figures: str
) -> Section:
    kinds = "".join(
        f'<span class="key {kind}">{kind}</span>' for kind in dict.fromkeys(p.kind for p in points)
    )
    return Section(
        name,
        heading,
        f"{lead} Up and to the right is better; the line is the Pareto front.",
        [
            f'<p class="keys">{kinds}</p>'
            + charts.scatter(points, title=heading, x_label="tokens per pass", y_label=label)
        ],
        figures,
    )


SHOWN = {
    "TTFT, p99": "ttft_p99",
    "TTFT, p50": "ttft_p50",
    "ITL, p99": "itl_p99",
    "ITL, p50": "itl_p50",
}
"""Latencies in the table and plot of a server, by the names of their rows."""


def latency(found: Sequence[BenchResult]) -> Iterator[Section]:
    """A server under open-loop load."""
    for result in _of(found, "serve"):
        arrivals = result.summary.get("arrivals")
        if not arrivals or not arrivals["rates"]:
            continue
        rows, limits = arrivals["rates"], arrivals["limits"]
        yield Section(
            "latency",
            "Latency under load",
            "Requests arrive at random, whether or not earlier ones are complete. A good one has its "
            f"first token within {limits['ttft'] * 1e3:g} ms and no inter-token latency above "
            f"{limits['itl'] * 1e3:g} ms.",
            [*_waits(rows), _goodput(rows)],
            _arrivals_table(rows),
        )


def _waits(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Latency by arrival rate, if any request was answered."""
    series = {
        name: [(row["rate"], row[key] * 1e3) for row in rows if row[key]]
        for name, key in SHOWN.items()
    }
    series = {name: points for name, points in series.items() if points}
    if series:
        yield charts.lines(
            series,
            title="Latency against the rate of arrival",
            x_label="arriving requests per second",
            y_label="milliseconds",
            y_log=True,
        )


def _goodput(rows: Sequence[dict[str, Any]]) -> str:
    """Goodput and all requests by arrival rate."""
    # Over the same seconds as the good ones: few arrivals at random are not quite at their rate.
    whole = [
        (r["rate"], r["requests"] * r["goodput"] / r["good"] if r["good"] else r["rate"])
        for r in rows
    ]
    return charts.lines(
        {"all": whole, "good": [(row["rate"], row["goodput"]) for row in rows]},
        title="Goodput against the rate of arrival",
        x_label="arriving requests per second",
        y_label="requests per second",
    )


def _arrivals_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["requests/s", "sent", "failed", "good", "goodput/s", "tok/s"]
    cells = [
        [
            f"{row['rate']:g}",
            str(row["requests"]),
            str(row["failed"]),
            str(row["good"]),
            f"{row['goodput']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            *("" if row[key] is None else f"{row[key] * 1e3:.0f}" for key in SHOWN.values()),
        ]
        for row in rows
    ]
    return table([*head, *SHOWN], cells, text_columns=0)


def bounds(found: Sequence[BenchResult]) -> Iterator[Section]:
    """The comparison with llama.cpp, row by row, with its bounds."""
    for result in _of(found, "against"):
        rows = [
            [
                row["name"],
                f"{row['ours']:.2f}",
                "" if row["theirs"] is None else f"{row['theirs']:.2f}",
                row["unit"],
                "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                row["bound"] or "",
                {None: "", True: "met", False: "not met"}[row["met"]],
            ]
            for row in result.samples
        ]
        if rows:
            head = ["", "ours", "theirs", "unit", "ratio", "must be", ""]
            yield Section(
                "bounds",
                "Comparison with llama.cpp",
                f"{result.summary.get('met')} of {result.summary.get('bounds')} bounds are met.",
                [table(head, rows)],
                "",
            )


SECTIONS = (peers, tasks, batches, quality, latency, bounds)
"""In the order of the page."""
