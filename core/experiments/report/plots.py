"""The report's figures as inline SVG: matplotlib draws, and what is text or axis takes the page's own colour, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .result import Comparison, Report
from .table import Table
from .words import name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
"""Stands for the page's text colour until `_inline` replaces it."""
COLOURS = ("#3f87c9", "#ee7733", "#228833", "#aa3377", "#66ccee", "#bbaa33")
"""Readable on white and on near black, and told apart by the colour blind; beyond six arms they repeat with other dashes."""
DASHES = ("-", "--", ":")
POINTS = 400
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def figures(table: Table, report: Report) -> list[tuple[str, str]]:
    """(caption, SVG element), those that there is something to show for."""
    arms = [arm.name for arm in report.arms]
    judged = [row for row in report.comparisons if row.low is not None and row.scale == "relative" and row.bucket == "all"]
    found: list[tuple[str, str]] = []
    if judged:
        caption = "Change beside the control, with intervals corrected for measures and looks"
        found.append((caption, _draw("changes", lambda axes: _changes(axes, judged, arms), 0.9 + 0.34 * len(judged))))
    if len(table):
        found.append(
            ("Share of requests whose first token took longer", _draw("tail", lambda axes: _tail(axes, table, "ttft")))
        )
    if len(table.gaps):
        found.append(
            ("Share of tokens that took longer after the one before", _draw("gaps", lambda axes: _tail(axes, table, "gap")))
        )
    if len(table):
        found.append(("Median and P95 of TTFT over time", _draw("time", lambda axes: _over_time(axes, table))))
    return found


def _draw(name: str, paint: Callable[[Axes], None], height: float = 3.4) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(7.6, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(file.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """The element alone, without what only a file of its own needs; ids made unique within the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r'<svg \1width="100%"', svg)
    svg = re.sub(r'^(<svg [^>]*?)height="[^"]*" ?', r"\1", svg)
    return svg.replace(INK, "currentColor").strip()


def _look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}


def _changes(axes: Axes, rows: list[Comparison], arms: list[str]) -> None:
    names = list(dict.fromkeys(name_of(row) for row in rows))
    treated = arms[1:]
    for row in rows:
        assert row.change is not None
        assert row.low is not None
        assert row.high is not None
        i = treated.index(row.arm)
        at = -names.index(name_of(row)) - 0.5 * (i + 0.5) / len(treated) + 0.25
        ends = [[row.change - row.low], [row.high - row.change]]
        axes.errorbar(
            [row.change], [at], xerr=ends, fmt="o", capsize=3, markersize=5 if row.different else 3, color=_look(i + 1)["color"]
        )
    for i, name in enumerate(treated):
        axes.plot([], [], "o", color=_look(i + 1)["color"], label=name)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks([-i for i in range(len(names))], names)
    axes.set_xlabel("change, %")
    limit = float(np.clip(max(max(abs(row.low or 0), abs(row.high or 0)) for row in rows), 5, 300))
    axes.set_xlim(max(-105.0, -1.05 * limit), 1.05 * limit)
    axes.legend(loc="upper right")


def _tail(axes: Axes, table: Table, source: str) -> None:
    """1 minus the distribution function, both axes on a log scale: the tail is what percentiles are about."""
    for i, facts in enumerate(table.arms):
        if source == "ttft":
            values = table.columns["ttft"][(table.arm == i) & np.isfinite(table.columns["ttft"])]
        else:
            values = table.gaps[(table.arm == i)[table.gap_row]]
        if len(values):
            above = np.geomspace(1, 1 / len(values), min(POINTS, len(values)))
            ordered = np.sort(np.maximum(values, 1e-3))
            ranks = np.minimum(((1 - above) * len(values)).astype(int), len(values) - 1)
            axes.plot(ordered[ranks], above, label=facts.name, **_look(i))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for share, name in ((0.5, "P50"), (0.05, "P95"), (0.01, "P99")):
        axes.axhline(share, color=INK, linewidth=0.4, linestyle=":")
        axes.annotate(name, (1, share), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set_xlabel("ms")
    axes.set_ylabel("share above")
    axes.legend(loc="lower left")


def _over_time(axes: Axes, table: Table, parts: int = 40) -> None:
    arrival, ttft = table.columns["arrival"], table.columns["ttft"]
    begin, end = float(arrival.min()), float(arrival.max())
    step = max(1e-9, (end - begin) / parts)
    place = np.minimum(((arrival - begin) / step).astype(int), parts - 1)
    for i, facts in enumerate(table.arms):
        own = (table.arm == i) & np.isfinite(ttft)
        for probability, width in ((50, 1.8), (95, 0.9)):
            found = [(part, ttft[own & (place == part)]) for part in range(parts)]
            shown = [
                (begin + (part + 0.5) * step, float(np.percentile(values, probability)))
                for part, values in found
                if len(values) >= 5
            ]
            if shown:
                x, y = np.array(shown).T
                label = facts.name if probability == 50 else None
                axes.plot((x - begin) / 60, y, linewidth=width, label=label, **_look(i))
    axes.set_yscale("log")
    axes.set_xlabel("minutes since the first request")
    axes.set_ylabel("ms")
    if _labelled(axes.get_lines()):
        axes.legend(loc="upper left")


def _labelled(lines: Iterable[Any]) -> bool:
    return any(not str(line.get_label()).startswith("_") for line in lines)
