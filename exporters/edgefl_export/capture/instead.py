"""Replacements to suggest for ops that no engine can run: the last sentence of a refusal."""

from __future__ import annotations

_DETERMINANT = (
    "For a matrix with a determinant in closed form, such as a triangular one, write the sum of the logarithms of its "
    "diagonal; write determinants of 2x2 and 3x3 matrices out"
)
DECOMPOSITION = (
    "Compute the decomposition once outside of the model and pass it as a buffer, or parametrize the model by its "
    "factors"
)
_GAMMA = (
    "Write Stirling's series, for x above 7 (x - 0.5) * x.log() - x + 0.918939 + 1 / (12 * x), and below it "
    "lgamma(x) = lgamma(x + 1) - log(x)"
)
_SAMPLING = (
    "Write the interpolation by gather: positions below and above with floor(), their weights as products; or detach the "
    "image and the grid, so that nothing before them is trained"
)
_SPECIAL = "Write the series or the approximation that the model needs"

FORMLESS = {
    "_ctc_loss": "Use loss=edgefl.losses.CTC(length) with labels padded by its blank, instead of F.ctc_loss in a "
    "loss of your own",
    "grid_sampler_2d_backward": _SAMPLING,
    "grid_sampler_3d_backward": _SAMPLING,
    "lgamma": _GAMMA,
    "digamma": _GAMMA.replace("lgamma(x) = lgamma(x + 1) - log(x)", "its derivative"),
    "polygamma": _SPECIAL,
    "igamma": _SPECIAL,
    "igammac": _SPECIAL,
    "erfinv": _SPECIAL,
    "i0": _SPECIAL,
    "special_i0e": _SPECIAL,
    "special_log_ndtr": "Write log(0.5 * erfc(-x / sqrt(2))) for x above -5 and -x * x / 2 - log(-x) - 0.918939 below",
    "_linalg_slogdet": _DETERMINANT,
    "_linalg_det": _DETERMINANT,
    "linalg_matrix_exp": "Write the series I + A + A @ A / 2 + ... for A / 2^k, and square the result k times",
    "linalg_lu_solve": DECOMPOSITION,
    "linalg_lu_factor_ex": DECOMPOSITION,
    "linalg_inv_ex": DECOMPOSITION,
    "_linalg_solve_ex": DECOMPOSITION,
    "linalg_cholesky_ex": DECOMPOSITION,
    "linalg_qr": DECOMPOSITION,
    "_linalg_svd": DECOMPOSITION,
    "_linalg_eigh": DECOMPOSITION,
    "linalg_eig": DECOMPOSITION,
    "linalg_lstsq": DECOMPOSITION,
    "linalg_pinv": DECOMPOSITION,
}
"""By the name of an op without overload: ops without a form for any engine."""

_FOURIER = (
    "Transform frames of at most 2,048 samples, or write the transform as products with constant matrices: of n samples to "
    "k frequencies, real and imaginary part are x @ torch.cos(a) and -(x @ torch.sin(a)) with a[n, k] = 2 pi n k / len(x)"
)
_OTHERS = {
    "_fft_r2c": _FOURIER,
    "_fft_c2r": _FOURIER,
    "_fft_c2c": _FOURIER,
    "embedding_renorm": "Leave max_norm out and divide the rows that are read: e / (e.norm(dim=-1, keepdim=True) / max_norm)"
    ".clamp_min(1)",
    "mode": "Count equal entries with comparisons and take the most frequent one by argmax",
}


def name_of(op: object) -> str:
    """Return the name of ``aten.<name>.<overload>``."""
    parts = str(op).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def instead_of(op: object, otherwise: str) -> str:
    """Return the suggestion for ``op``, or ``otherwise`` if there is none."""
    name = name_of(op)
    return FORMLESS.get(name) or _OTHERS.get(name.removesuffix("_"), otherwise)
