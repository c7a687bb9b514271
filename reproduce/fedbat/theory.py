"""Terms of the variance in FedBAT's Theorems 1 to 3, exactly (fedbat.md 6).

alpha = norm_inf(m), q^2 = d norm_inf(m)^2 / ||m||^2 - 1; the mean of K of N clients errs by (q^2 (N-1) + N - K) / (K (N-1))
of the mean square. All draws and choices of clients are enumerated. Runs do not test the theorems' bounds: these are 1e4
times above them.
"""

from __future__ import annotations

from itertools import combinations

import torch

from edgefl.codecs.binarize import draw
from reproduce.entry import ArmRun, Computed, Entry, Measurements, bounded, note_of

TERMS = {
    "bias": "S(m) is unbiased", "variance": "its mean square error is q^2 ||m||^2",
    "sampling": "K of N clients: Theorem 2's factor",
}  # fmt: skip
"""Statements by the figure that vanishes."""
CLIENTS, SAMPLED, DIMENSIONS, GRID = 8, 3, 10, 64


def moments(run: ArmRun) -> Measurements:
    """Return by how much bias, variance, and error of a mean over sampled clients differ from the theorems' terms.

    Changes are multiples of alpha / 32: over 64 equidistant numbers in place of the uniform noise moments are exact. Half
    of the clients have the negative changes of the others, so that the theorems' factor is attained.
    """
    generator = torch.Generator().manual_seed(run.seed)
    change = 2 * torch.randint(GRID + 1, (DIMENSIONS,), generator=generator, dtype=torch.float64) / GRID - 1
    change[0] = 1.0
    half = torch.stack([change[torch.randperm(DIMENSIONS, generator=generator)] for _ in range(CLIENTS // 2)])
    m = torch.cat([half, -half])
    alpha = m.abs().amax(1, keepdim=True)
    zeta = (torch.arange(GRID, dtype=torch.float64)[:, None, None] + 0.5) / GRID
    draws = alpha * draw(m.expand(GRID, -1, -1), alpha, zeta.expand(-1, *m.shape))
    length, variance = (m**2).sum(1), ((draws - m) ** 2).mean(0).sum(1)
    q2 = DIMENSIONS * alpha[:, 0] ** 2 / length - 1
    factor = (q2 * (CLIENTS - 1) + CLIENTS - SAMPLED) / (SAMPLED * (CLIENTS - 1))
    errors = [
        (m[list(each)].mean(0) ** 2).sum() + variance[list(each)].sum() / SAMPLED**2
        for each in combinations(range(CLIENTS), SAMPLED)
    ]
    found = (
        (draws.mean(0) - m).abs().max(),
        (variance / (q2 * length) - 1).abs().max(),
        torch.stack(errors).mean() / (factor * length).mean() - 1,
    )
    return Measurements(dict(zip(TERMS, map(float, found), strict=True)))


THEORY = Entry(
    "fedbat/theory", "Theorems 1 to 3: the terms of the variance", lambda _: [Computed("moments", moments)],
    checks=[bounded(text, 1e-12, ("moments", term), shown="off by {:.0e}") for term, text in TERMS.items()],
    note=note_of(__doc__),
)  # fmt: skip
