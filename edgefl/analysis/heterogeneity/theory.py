"""Constants and bounds of Per-FedAvg's theory as pure functions (per_fedavg.md 6.3 to 6.5; Fallah et al. 2020, Appendix G).

The paper's bound for sampled users with tau > 1 is not certified (per_fedavg.md 8.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from edgefl.errors import ConfigError


@dataclass(frozen=True)
class LossConstants:
    """Constants of the users' losses in assumptions A1 to A5 of Per-FedAvg's theory.

    Attributes:
        B: bound on the norm of a gradient.
        L: bound on the norm of a Hessian.
        rho: Lipschitz constant of the Hessian.
        sigma_g: standard deviation of per-sample gradients.
        sigma_h: standard deviation of per-sample Hessians.
        gamma_g2: gamma_G^2, mean squared distance of the users' gradients from their mean.
        gamma_h2: gamma_H^2, mean squared distance of the users' Hessians from their mean.
    """

    B: float
    L: float
    rho: float
    sigma_g: float
    sigma_h: float
    gamma_g2: float
    gamma_h2: float


@dataclass(frozen=True)
class TrainingSetting:
    """Constants of training with Per-FedAvg.

    Attributes:
        alpha: step size of the inner step (adaptation).
        beta: local step size.
        tau: number of local steps.
        inner: batch size D of the inner gradient, in samples.
        outer: batch size D' of the outer gradient.
        hessian: batch size D'' of the Hessian.
        delta: step of the Hessian-free difference.
        fraction: fraction r of the users that a round selects.
        users: number n of users.

    Raises:
        ConfigError: if a value is out of range.
    """

    alpha: float
    beta: float
    tau: int
    inner: int = 40
    outer: int = 40
    hessian: int = 40
    delta: float = 1e-3
    fraction: float = 1.0
    users: int = 1

    def __post_init__(self) -> None:
        wrong = [name for name in ("beta", "delta", "fraction") if not getattr(self, name) > 0]
        wrong += [name for name in ("tau", "inner", "outer", "hessian", "users") if getattr(self, name) < 1]
        wrong += ["alpha"] * (not self.alpha >= 0) + ["fraction"] * (self.fraction > 1)
        if wrong:
            raise ConfigError(
                "the theory of Per-FedAvg has alpha >= 0, beta and delta > 0, a fraction in (0, 1], and whole numbers from "
                f"1 on, found {wrong[0]} = {getattr(self, wrong[0])}",
                name=wrong[0],
            )


def smoothness(of: LossConstants, alpha: float) -> float:
    """Return L_F = 4 L + alpha rho B: F_i and F are L_F-smooth (lemma 4.2)."""
    return 4 * of.L + alpha * of.rho * of.B


def beta_max(of: LossConstants, setting: TrainingSetting) -> float:
    """Return 1 / (10 tau L_F), the theorem's largest local step size; infinite for a flat landscape."""
    smooth = smoothness(of, setting.alpha)
    return 1 / (10 * setting.tau * smooth) if smooth else math.inf


def alpha_max(of: LossConstants) -> float:
    """Return 1 / L, the theorem's largest inner step size."""
    return 1 / of.L if of.L else math.inf


def bias(of: LossConstants, setting: TrainingSetting) -> float:
    """Return 2 alpha L sigma_g / sqrt(D), a bound of ||E[G] - grad F_i|| (lemma 4.3)."""
    return 2 * setting.alpha * of.L * of.sigma_g / math.sqrt(setting.inner)


def sigma_f2(of: LossConstants, setting: TrainingSetting) -> float:
    """Return sigma_F^2, a bound of E||G - grad F_i||^2 (lemma 4.3)::

        12 [B^2 + sigma_g^2 (1/D' + (alpha L)^2 / D)] [1 + alpha^2 sigma_h^2 / (4 D'')] - 12 B^2

    It is computed as a sum of non-negative terms: for small noise the difference above loses its digits.
    """
    noise = of.sigma_g**2 * (1 / setting.outer + (setting.alpha * of.L) ** 2 / setting.inner)
    curved = setting.alpha**2 * of.sigma_h**2 / (4 * setting.hessian)
    return 12 * (noise * (1 + curved) + of.B**2 * curved)


def gamma_f2(of: LossConstants, alpha: float) -> float:
    """Return 3 B^2 alpha^2 gamma_H^2 + 192 gamma_G^2, a bound of (1/n) sum ||grad F_i - grad F||^2 (lemma 4.4)."""
    return 3 * of.B**2 * alpha**2 * of.gamma_h2 + 192 * of.gamma_g2


def m_fo(of: LossConstants, setting: TrainingSetting) -> float:
    """Return alpha L (sigma_g / sqrt(D) + B), a bound on the bias of first-order Per-FedAvg (H.1 in per_fedavg.md 6.3).

    Its term alpha L B does not depend on the batch size D: larger batches do not remove it.
    """
    return setting.alpha * of.L * (of.sigma_g / math.sqrt(setting.inner) + of.B)


def s_fo2(of: LossConstants, setting: TrainingSetting) -> float:
    """Return 2 sigma_g^2 (1/D' + (alpha L)^2 / D) + 2 (alpha L B)^2, a bound on the squared error of FO (H.1)."""
    scaled = setting.alpha * of.L
    return 2 * of.sigma_g**2 * (1 / setting.outer + scaled**2 / setting.inner) + 2 * (scaled * of.B) ** 2


def m_hf(of: LossConstants, setting: TrainingSetting) -> float:
    """Return alpha (2 L sigma_g / sqrt(D) + L sigma_g / sqrt(D') + rho delta B^2), a bound on the bias of HF (H.2).

    HF is Hessian-free Per-FedAvg.
    """
    noise = of.L * of.sigma_g * (2 / math.sqrt(setting.inner) + 1 / math.sqrt(setting.outer))
    return setting.alpha * (noise + of.rho * setting.delta * of.B**2)


def s_hf2(of: LossConstants, setting: TrainingSetting) -> float:
    """Return 6 sigma_g^2 (2 (alpha L)^2 / D + 2 / D' + alpha^2 / (2 delta^2 D'')) + 2 (alpha rho delta)^2 B^4 (H.2).

    It is pessimistic: its 1 / delta^2 assumes two batches, and HF uses one for both gradients (per_fedavg.md 2.3).
    """
    alpha, delta = setting.alpha, setting.delta
    noise = 2 * (alpha * of.L) ** 2 / setting.inner + 2 / setting.outer
    noise += alpha**2 / (2 * delta**2 * setting.hessian)
    return 6 * of.sigma_g**2 * noise + 2 * (alpha * of.rho * delta) ** 2 * of.B**4


class Estimator(Enum):
    """Estimator G of the meta-gradient, with bounds on its bias and mean squared error.

    EXACT computes the Hessian term, FO leaves it out, and HF replaces it by a difference of gradients. The theorem is
    stated for EXACT. It holds for FO and HF with the bounds of these estimators (per_fedavg.md 6.3).
    """

    EXACT = "EXACT"
    FO = "FO"
    HF = "HF"

    def bias(self, of: LossConstants, setting: TrainingSetting) -> float:
        """Return the estimator's bound on its bias ||E[G] - grad F_i||."""
        bounds = {Estimator.EXACT: bias, Estimator.FO: m_fo, Estimator.HF: m_hf}
        return bounds[self](of, setting)

    def error(self, of: LossConstants, setting: TrainingSetting) -> float:
        """Return the estimator's bound on its mean squared error E||G - grad F_i||^2."""
        bounds = {Estimator.EXACT: sigma_f2, Estimator.FO: s_fo2, Estimator.HF: s_hf2}
        return bounds[self](of, setting)


EXACT, FO, HF = Estimator


def sampling_factor(fraction: float, users: int) -> float:
    """Return (1 - r) / (r (n - 1)) for the fraction r and n users; 0 for one user.

    It is the variance of the mean of r n of n fixed numbers, drawn without replacement, over the variance of the
    numbers.
    """
    return 0.0 if users == 1 else (1 - fraction) / (fraction * (users - 1))


def sigma_t2(of: LossConstants, setting: TrainingSetting, by: Estimator = EXACT) -> float:
    """Return sigma_T^2, the error that more rounds do not remove (theorem 4.5): drift + sampling + bias^2::

    drift    = 280 (beta L_F)^2 tau (tau - 1) (2 sigma_F^2 + gamma_F^2);
    sampling = beta L_F (2 sigma_F^2 + gamma_F^2 (1 - r) / (r (n - 1)));
    bias^2   = 4 alpha^2 L^2 sigma_g^2 / D.
    """
    step = setting.beta * smoothness(of, setting.alpha)
    noise, apart = 2 * by.error(of, setting), gamma_f2(of, setting.alpha)
    drift = 280 * step**2 * setting.tau * (setting.tau - 1) * (noise + apart)
    sampled = step * (noise + apart * sampling_factor(setting.fraction, setting.users))
    return drift + sampled + by.bias(of, setting) ** 2


def bound(
    of: LossConstants, setting: TrainingSetting, *, rounds: int, gap: float, by: Estimator = EXACT
) -> float:
    """Return 4 (F(w_0) - F*) / (beta tau K) + 4 sigma_T^2, a bound of the mean of E||grad F||^2 over K rounds (theorem 4.5).

    Args:
        of: constants of the losses.
        setting: training constants.
        rounds: the number of rounds K.
        gap: F(w_0) - F*.
        by: the estimator of the meta-gradient.

    Returns:
        The bound.
    """
    return 4 * gap / (setting.beta * setting.tau * rounds) + 4 * sigma_t2(of, setting, by)


def drift(
    of: LossConstants, setting: TrainingSetting, step: int, by: Estimator = EXACT
) -> tuple[float, float]:
    """Return bounds on the distance of users' models from their mean after ``step`` local steps (F.2).

    The pair is (mean distance, mean squared distance)::

        4 beta t (sigma_F + gamma_F)        35 beta^2 t tau (2 sigma_F^2 + gamma_F^2)

    Both need beta <= 1 / (10 tau L_F).
    """
    noise, apart = by.error(of, setting), gamma_f2(of, setting.alpha)
    mean = 4 * setting.beta * step * (math.sqrt(noise) + math.sqrt(apart))
    return mean, 35 * setting.beta**2 * step * setting.tau * (2 * noise + apart)
