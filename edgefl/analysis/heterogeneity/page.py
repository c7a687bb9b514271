"""The report as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from edgefl.analysis.charts import svg
from edgefl.analysis.charts.html import table
from edgefl.analysis.heterogeneity.report import HeterogeneityReport, reading

BARS = 24
"""Users that are drawn as bars; more of them are a line."""

Sections = Mapping[str, Sequence[Mapping[str, str]]]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:800px;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{border-bottom:1px solid #8884;padding:.2em .8em .2em 0;"
    "text-align:left;vertical-align:top}.warning{border-left:4px solid #d1495b;padding-left:.8em}"
    "svg{max-width:100%;height:auto}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}}"
)


def page(title: str, report: HeterogeneityReport, sections: Sections, notes: Sequence[str]) -> str:
    """``sections`` are tables of rows with equal keys, ``notes`` what to read before them."""
    verdict = reading(report.kappa, max(report.alpha_lambda))
    warned = ' class="warning"' if "unsafe" in verdict else ""
    body = [f"<h1>{escape(title)}</h1>", f"<p{warned}>{escape(verdict)}</p>"]
    body += [f"<p>{escape(note)}</p>" for note in notes]
    body += [_pairwise(report), _kappas(report)]
    body += [f"<h2>{escape(name)}</h2>{table(rows)}" for name, rows in sections.items()]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        + "\n".join(body)
        + "</body></html>\n"
    )


def _pairwise(report: HeterogeneityReport) -> str:
    names = [str(user) for user in range(len(report.counts))]
    return svg.heatmap(
        report.labels.pairwise.tolist(),
        names,
        names,
        title="Total variation between the users' label frequencies",
        x="user",
        y="user",
    )


def _kappas(report: HeterogeneityReport) -> str:
    kappas = report.adaptation.kappas
    title = f"kappa per user, alpha {report.setting.alpha:g}: what FO leaves out"
    if len(kappas) <= BARS:
        named = {str(user): value for user, value in enumerate(kappas)}
        return svg.bar_chart(named, title=title, x="user", y="kappa")
    last = len(kappas) - 1
    lines: dict[str, list[tuple[float, float]]] = {
        "kappa": [(float(at), own) for at, own in enumerate(kappas)]
    }
    lines["0.2: HF differs visibly"] = [(0.0, 0.2), (float(last), 0.2)]
    return svg.line_chart(lines, title=title, x="user", y="kappa", x_span=svg.COUNT, y_span=svg.AMOUNT)
