"""Heterogeneity of users at one model, as a report (per_fedavg.md 6.6 a to g)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgefl.analysis.heterogeneity import theory
from edgefl.analysis.heterogeneity.curvature import (
    AdaptationAccumulator,
    AdaptationSummary,
    CurvatureReport,
    ExaminedUser,
    GradientAccumulator,
    GradientDissimilarity,
    Progress,
    adapt_user,
    curvature_report,
    user_gradient,
)
from edgefl.analysis.heterogeneity.labels import (
    FeatureReport,
    LabelReport,
    WassersteinDistances,
    feature_report,
    label_report,
    majority_levels,
)
from edgefl.analysis.heterogeneity.losses import FlatLoss, Shard, batches
from edgefl.data.dataset import Array

CURVED, CURVED_ROWS = 5, 256
"""Default number of users with examined Hessians, and samples of each."""


@dataclass(frozen=True, eq=False)
class HeterogeneityReport:
    """Measurements of the heterogeneity of users.

    Attributes:
        setting: the training setting.
        counts: samples per user and class, (n, classes).
        labels: dissimilarity of labels.
        features: dissimilarity of inputs.
        gradients: dissimilarity of gradients.
        adaptation: meta-gradients after an inner step.
        curvature: curvature of some users' losses.
    """

    setting: theory.TrainingSetting
    counts: Array
    labels: LabelReport
    features: FeatureReport
    gradients: GradientDissimilarity
    adaptation: AdaptationSummary
    curvature: CurvatureReport

    @property
    def constants(self) -> theory.LossConstants:
        """Constants of the losses, estimated along one inner step; no network meets the assumptions everywhere."""
        return theory.LossConstants(
            B=max(self.gradients.largest, self.adaptation.largest),
            L=self.curvature.largest,
            rho=self.curvature.rho,
            sigma_g=math.sqrt(self.gradients.variance),
            sigma_h=math.sqrt(self.curvature.sigma_h2),
            gamma_g2=self.gradients.plug_in,
            gamma_h2=self.curvature.gamma_h2,
        )

    @property
    def alpha_lambda(self) -> tuple[float, ...]:
        """The inner step size alpha times the largest eigenvalue of the Hessian, for each examined user."""
        return tuple(self.setting.alpha * high for _, high in self.curvature.eigenvalues)

    @property
    def kappa(self) -> float:
        """Mean kappa over the users: the relative error of the first-order estimator (FO)."""
        return float(np.mean(self.adaptation.kappas))

    def label_bound(self, most: float) -> float:
        """Return 4 ``most``^2 mean TV^2 (eq. 14): an estimate of gamma_G^2 if ``most`` is B, of gamma_H^2 if ``most`` is
        L.

        It is no bound, because single samples have larger gradients than the batches that B is measured on.
        """
        return 4 * most**2 * self.labels.mean_tv2


def examine(
    losses: FlatLoss,
    shards: Sequence[Shard],
    counts: Array,
    setting: theory.TrainingSetting,
    *,
    curved: int = CURVED,
    seed: int = 0,
    on_progress: Progress = lambda _: None,
) -> HeterogeneityReport:
    """Measure the heterogeneity of users at the model in ``losses``.

    Args:
        losses: the objective's loss and weights.
        shards: the users' samples, in random order.
        counts: samples per user and class, (n, classes).
        setting: the training setting.
        curved: number of users, evenly spaced, with an examined Hessian; 0 for all. Each is examined on 256
            samples.
        seed: seed of the draws.
        on_progress: receives the name of each step.

    Returns:
        All measurements.

    Raises:
        DataError: if a user has fewer than two samples.
    """
    users = len(shards)
    chosen = {int(at) for at in np.linspace(0, users - 1, min(curved or users, users)).round()}
    gradients, adaptations, examined = GradientAccumulator(), AdaptationAccumulator(), []
    for user in range(users):
        on_progress(f"gradients of user {user + 1} of {users}")
        shard = shards[user]
        parts = batches(shard, user)
        gradient = user_gradient(losses, losses.start, parts)
        gradients.add(gradient)
        adaptations.add(adapt_user(losses, gradient.mean, parts, setting.alpha))
        if user in chosen:
            examined.append(ExaminedUser(user, shard.rows(slice(CURVED_ROWS)), gradient.mean))
    curvature = curvature_report(losses, examined, setting.alpha, on_progress)
    on_progress("distances between inputs")
    inputs = [shards[user].x.flatten(1).numpy() for user in range(users)]
    return HeterogeneityReport(
        setting=setting,
        counts=counts,
        labels=label_report(counts),
        features=feature_report(inputs, seed=seed),
        gradients=gradients.report(),
        adaptation=adaptations.report(),
        curvature=curvature,
    )


def reading(kappa: float, alpha_lambda: float) -> str:
    """Return a sentence that recommends the estimator FO, HF or EXACT of Per-FedAvg.

    Args:
        kappa: mean relative error of FO.
        alpha_lambda: inner step size times the largest eigenvalue of a Hessian.
    """
    if alpha_lambda > 1:
        return (
            f"FO unsafe: alpha * lambda_max = {alpha_lambda:.3g} > 1, along that direction FO climbs; take HF or EXACT, or "
            "a smaller alpha"
        )
    if kappa < 0.05:
        return f"kappa {kappa:.3g} < 0.05: FO, HF and EXACT coincide, FO is enough"
    if kappa < 0.2:
        return f"kappa {kappa:.3g} in 0.05 to 0.2: HF differs little from FO"
    if kappa <= 0.8:
        return f"kappa {kappa:.3g} in 0.2 to 0.8: HF differs visibly from FO"
    return f"kappa {kappa:.3g} > 0.8: the Hessian decides the step, FO drops most of it"


def as_object(report: HeterogeneityReport) -> dict[str, Any]:
    """Return the report as a dictionary of JSON types; numbers that are not finite become None."""
    labels, gradients, setting = report.labels, report.gradients, report.setting
    user_level, sample_level = majority_levels(report.counts)
    return {
        "setting": asdict(setting),
        "users": len(report.counts),
        "labels": {
            "p": labels.p.tolist(),
            "tv": labels.tv.tolist(),
            "mean_tv2": labels.mean_tv2,
            "pairwise_tv": labels.pairwise.tolist(),
            "mean_pairwise_tv": labels.mean_pairwise,
            "w1_of_0_1_metric": labels.tv.tolist(),
            "w1_of_ordered_labels": labels.ordered_w1.tolist(),
            "majority_accuracy": {"users": user_level, "samples": sample_level},
        },
        "features": {
            "features": report.features.features,
            "samples": report.features.rows,
            "found": _means(report.features.found),
            "chance": _means(report.features.chance),
        },
        "gradients": asdict(gradients)
        | {"ratio": gradients.ratio, "label_bound": report.label_bound(report.constants.B)},
        "meta_gradients": asdict(report.adaptation)
        | {"gamma_f2_bound": theory.gamma_f2(report.constants, setting.alpha)},
        "hessians": asdict(report.curvature)
        | {"L": report.curvature.largest, "label_bound": report.label_bound(report.curvature.largest)},
        "theory": _theory(report),
        "kappa": {
            "mean": report.kappa,
            "largest": max(report.adaptation.kappas),
            "alpha_lambda_max": list(report.alpha_lambda),
            "reading": reading(report.kappa, max(report.alpha_lambda)),
        },
    }


def _means(distances: WassersteinDistances) -> Mapping[str, float]:
    return {name: float(each.mean()) for name, each in vars(distances).items()}


def _theory(report: HeterogeneityReport) -> dict[str, Any]:
    of, setting = report.constants, report.setting
    most_alpha, most_beta = theory.alpha_max(of), theory.beta_max(of, setting)
    return {
        **asdict(of),
        "L_F": theory.smoothness(of, setting.alpha),
        "sigma_f2": theory.sigma_f2(of, setting),
        "alpha_max": _finite(most_alpha),
        "alpha_satisfies": setting.alpha <= most_alpha,
        "beta_max": _finite(most_beta),
        "beta_satisfies": setting.beta <= most_beta,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
