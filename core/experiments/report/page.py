"""The report as one HTML file: nothing is loaded from anywhere, no script, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .plots import figures
from .result import Comparison, Report
from .table import Table
from .text import arm_cells, by_bucket, cells, not_enough, ratio_text, span, title, unit_head

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --soft: #5c6670; --line: #d5dae0;
  --good: #18794e; --bad: #b42318; --note: #fff6db; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --ink: #e6e9ec; --soft: #9aa5b1; --line: #343b42;
    --good: #5ed39a; --bad: #ff8a7a; --note: #3a3115; }
}
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.soft, figcaption, details { color: var(--soft); }
.verdict { font-size: 1.15rem; border-left: .3rem solid var(--line); padding-left: .8rem; }
.warning { background: var(--note); padding: .5rem .8rem; border-radius: .3rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { text-align: right; white-space: nowrap; } th.number { text-align: right; }
.better { color: var(--good); font-weight: 600; } .worse { color: var(--bad); font-weight: 600; }
figure { margin: 1.5rem 0; color: var(--ink); } figure svg { height: auto; }
"""


def page(table: Table, report: Report) -> str:
    name = escape(f"Experiment {report.experiment}, run {report.run}")
    parts = [
        f"<h1>{name}</h1>",
        f'<p class="soft">split by {escape(report.split)}, {span(report.since, report.until)}</p>',
        *(f'<p class="verdict">{escape(verdict)}</p>' for verdict in report.verdicts),
        *(f'<p class="warning">{escape(warning)}</p>' for warning in report.warnings),
        "<h2>Arms</h2>",
        _table(
            ("Arm", "Weight", "Requests", unit_head(report).capitalize(), "Left out"), map(arm_cells, report.arms), (1, 2, 3)
        ),
        f'<p class="soft">Sample ratio: {escape(ratio_text(report))}</p>',
    ]
    parts += _arm_tables(report, overall=True)
    for caption, svg in figures(table, report):
        labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
        parts.append(f"<figure>{labelled}<figcaption>{escape(caption)}</figcaption></figure>")
    parts += _arm_tables(report, overall=False)
    parts += ["<h2>How it was computed</h2>", *(f'<p class="soft">{escape(line)}</p>' for line in report.method)]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _arm_tables(report: Report, *, overall: bool) -> list[str]:
    """Headed tables: of all requests, or those by prompt length."""
    parts: list[str] = []
    for arm in report.arms[1:]:
        for bucket, rows in by_bucket(report, arm.name).items():
            if (bucket == "all") is overall:
                parts.append(f"<h2>{escape(title(report, arm.name, bucket, rows))}</h2>")
                parts += [] if not_enough(rows) else [_comparisons(rows, (report.arms[0].name, arm.name))]
    return parts


def _comparisons(rows: Sequence[Comparison], arms: tuple[str, str]) -> str:
    classes = [row.verdict if row.different else "" for row in rows]
    return _table(("Measure", *arms, "Change", "Verdict"), map(cells, rows), (1, 2, 3), classes)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int], classes: Sequence[str] = ()) -> str:
    """`numbers`: columns that are aligned to the right; `classes`: of each row's last cell."""

    def kind(column: int) -> str:
        return ' class="number"' if column in numbers else ""

    lines = ["<tr>" + "".join(f'<th scope="col"{kind(i)}>{escape(text)}</th>' for i, text in enumerate(head)) + "</tr>"]
    for at, row in enumerate(rows):
        line = [f"<td{kind(i)}>{escape(text)}</td>" for i, text in enumerate(row)]
        if classes and classes[at]:
            line[-1] = f'<td class="{classes[at]}">{escape(row[-1])}</td>'
        lines.append("<tr>" + "".join(line) + "</tr>")
    return '<div class="scroll"><table>' + "".join(lines) + "</table></div>"
