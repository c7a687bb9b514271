"""Heterogeneity reports as tables and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from edgefl.analysis import charts
from edgefl.analysis.charts import html_page, html_table
from edgefl.analysis.heterogeneity import theory
from edgefl.analysis.heterogeneity.curvature import PROBES, STEPS
from edgefl.analysis.heterogeneity.labels import group_users, majority_levels
from edgefl.analysis.heterogeneity.report import HeterogeneityReport, reading

Row = dict[str, str]

_GROUPS = 12
"""Largest number of groups of users with equal classes that are listed."""


def tables(report: HeterogeneityReport) -> dict[str, list[Row]]:
    """Return the tables of the report by section: labels, inputs, gradients, curvature, theory.

    A row has three columns: the quantity, its value, and a reference value or a remark.
    """
    return {
        "labels": _labels(report),
        "inputs": _inputs(report),
        "gradients": _gradients(report),
        "curvature": _curvature(report),
        "theory": _theory(report),
    }


def groups(report: HeterogeneityReport) -> list[Row]:
    """Return a row per group of users that have samples of the same classes; [] if there are more than 12 groups.

    The keys are ``classes``, ``users``, ``samples each``, ``TV`` and ``kappa``.
    """
    by_classes = group_users(report.counts)
    if len(by_classes) > _GROUPS:
        return []
    kappas, tv = report.adaptation.kappas, report.labels.tv
    return [
        {
            "classes": _ranges(classes) or "none",
            "users": _ranges(users),
            "samples each": f"{report.counts[users].sum(axis=1).mean():,.0f}",
            "TV": _number(sum(tv[users]) / len(users)),
            "kappa": _number(sum(kappas[user] for user in users) / len(users)),
        }
        for classes, users in by_classes.items()
    ]


def _labels(report: HeterogeneityReport) -> list[Row]:
    labels = report.labels
    by_user, by_sample = majority_levels(report.counts)
    return [
        _row(
            "mean TV² from p", labels.mean_tv2, f"TV {_number(labels.tv.min())} to {_number(labels.tv.max())}"
        ),
        _row("mean pairwise TV", labels.mean_pairwise, "over all pairs, each user with itself too"),
        _row("mean W1, labels 0/1 apart", labels.tv.mean(), "equals TV"),
        _row(
            "mean W1, labels on a line", labels.ordered_w1.mean(), "|y - y'| apart; only for ordered classes"
        ),
        _row("own commonest class is right", by_user, f"mean over users; {by_sample:.1%} of all samples"),
    ]


def _inputs(report: HeterogeneityReport) -> list[Row]:
    distances, chance = report.features.found, report.features.chance
    kinds = (
        ("W1 per feature", distances.per_feature, chance.per_feature, "exact, mean over features"),
        ("sliced W1", distances.sliced, chance.sliced, "random directions, a lower bound of W1"),
        ("matched W1", distances.matched, chance.matched, "subsamples, an upper bound of W1"),
    )
    return [
        _row(what, own.mean(), f"{_number(other.mean())} after shuffling samples across users; {how}")
        for what, own, other, how in kinds
    ]


def _gradients(report: HeterogeneityReport) -> list[Row]:
    gradients, adaptation, of = report.gradients, report.adaptation, report.constants
    bound = theory.gamma_f2(of, report.setting.alpha)
    return [
        _row(
            "gG², plug-in",
            gradients.plug_in,
            f"label bound 4 B² mean TV² ≈ {_number(report.label_bound(of.B))}, B of batches",
        ),
        _row("noise floor of it", gradients.noise_floor, "what users that are alike would show"),
        _row("gG², split halves", gradients.unbiased, "without that noise; may be below 0"),
        _row(
            "gG² / ‖mean gradient‖²",
            gradients.ratio or float("nan"),
            f"‖mean gradient‖² = {_number(gradients.mean_norm2)}",
        ),
        _row(
            "gF², meta-gradients", adaptation.gamma_f2, f"bound 3 B² alpha² gH² + 192 gG² = {_number(bound)}"
        ),
    ]


def _curvature(report: HeterogeneityReport) -> list[Row]:
    curvature, of = report.curvature, report.constants
    most = max(report.alpha_lambda)
    seen = f"{len(curvature.users)} of {len(report.counts)} users, {STEPS} Lanczos steps"
    return [
        _row(
            "kappa, mean",
            report.kappa,
            f"{_number(min(report.adaptation.kappas))} to "
            f"{_number(max(report.adaptation.kappas))} over all users",
        ),
        _row("alpha * lambda_max", most, f"above 1 FO climbs; {seen}"),
        _row(
            "gH²",
            curvature.gamma_h2,
            f"label bound 4 L² mean TV² ≈ {_number(report.label_bound(of.L))}; {seen}",
        ),
    ]


def _theory(report: HeterogeneityReport) -> list[Row]:
    of, setting = report.constants, report.setting
    most_alpha, most_beta = theory.alpha_max(of), theory.beta_max(of, setting)
    return [
        _row("B", of.B, "largest gradient norm seen, of a batch"),
        _row("L", of.L, "largest |eigenvalue| seen"),
        _row("rho", of.rho, "change of the Hessian along an inner step, per length"),
        _row("sigma_G²", of.sigma_g**2, "largest user's, per sample"),
        _row("sigma_H²", of.sigma_h**2, f"Frobenius, above the spectral one; {PROBES} Hutchinson probes"),
        _row("L_F", theory.smoothness(of, setting.alpha), "4 L + alpha rho B"),
        _row("alpha_max", most_alpha, _holds("alpha", setting.alpha, most_alpha)),
        _row("beta_max", most_beta, _holds("beta", setting.beta, most_beta)),
    ]


def _holds(name: str, value: float, most: float) -> str:
    verdict = "satisfies the theory" if value <= most else "is above what the theory allows"
    return f"{name} = {value:g} {verdict}"


def _row(what: str, value: float, beside: str) -> Row:
    return {"what": what, "value": _number(float(value)), "beside it": beside}


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: 0-4, 7, 9-10."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


BARS = 24
"""Largest number of users drawn as bars; more are drawn as a line."""

Sections = Mapping[str, Sequence[Mapping[str, str]]]

_STYLE = "td,th{text-align:left}.warning{border-left:4px solid #d1495b;padding-left:.8em}"


def page(title: str, report: HeterogeneityReport, sections: Sections, notes: Sequence[str]) -> str:
    """Return the report's HTML page.

    Args:
        title: title of the page.
        report: the measurements.
        sections: tables of rows with equal keys, by title.
        notes: paragraphs above the tables.

    Returns:
        The page's text.
    """
    verdict = reading(report.kappa, max(report.alpha_lambda))
    warned = ' class="warning"' if "unsafe" in verdict else ""
    body = [f"<p{warned}>{escape(verdict)}</p>"]
    body += [f"<p>{escape(note)}</p>" for note in notes]
    body += [_pairwise(report), _kappas(report)]
    body += [f"<h2>{escape(name)}</h2>{html_table(rows)}" for name, rows in sections.items()]
    return html_page(title, body, style=_STYLE)


def _pairwise(report: HeterogeneityReport) -> str:
    names = [str(user) for user in range(len(report.counts))]
    return charts.heatmap(
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
        return charts.bar_chart(named, title=title, x="user", y="kappa")
    last = len(kappas) - 1
    lines: dict[str, list[tuple[float, float]]] = {
        "kappa": [(float(at), own) for at, own in enumerate(kappas)]
    }
    lines["0.2: HF differs visibly"] = [(0.0, 0.2), (float(last), 0.2)]
    return charts.line_chart(
        lines, title=title, x="user", y="kappa", x_span=charts.COUNT, y_span=charts.AMOUNT
    )
