"""Where an axis has its marks, and how the numbers there are written."""

from __future__ import annotations

import math


def linear(low: float, high: float, wanted: int = 6, *, whole: bool = False) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from the one at or below ``low`` to the one at or above ``high``.

    Of a single value the axis goes half of it down and up, from 0 to 1 for a 0. ``whole``: no fractions.
    """
    if high <= low:
        half = abs(low) / 2
        low, high = (low - half, high + half) if half else (0.0, 1.0)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def logarithmic(low: float, high: float, wanted: int = 8) -> list[float]:
    """Powers of ten from the one at or below ``low`` > 0 to the one at or above ``high``, at even distances."""
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    step = max(1, math.ceil((last - first) / wanted))
    count = math.ceil((last - first) / step)
    return [10.0 ** (first + number * step) for number in range(count + 1)]


def written(value: float) -> str:
    """At most four digits: 0.25, 1500, 20k, 1e-12."""
    size = abs(value)
    if size < 1e-12:
        return "0" if size < 1e-300 else f"{value:.0e}"
    if size >= 1e6 or size < 1e-3:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value / 1000:g}k" if size >= 1e4 else f"{value:.4g}"
