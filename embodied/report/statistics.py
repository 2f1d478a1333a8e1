"""Intervals for success rates."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a binomial proportion, without continuity correction.

    Args:
        successes: how many of the trials succeeded.
        n: number of trials; 0 tells nothing: (0, 1).
        confidence: coverage, in (0, 1).

    Returns:
        (low, high), within [0, 1].

    Raises:
        ValueError: successes outside 0..n, or confidence outside (0, 1).

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes = {successes} is outside 0..n = {n}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence = {confidence} is outside (0, 1)")
    if n == 0:
        return 0.0, 1.0
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    centre = (successes + z2 / 2) / (n + z2)
    half = math.sqrt(z2 * (successes * (n - successes) / n + z2 / 4)) / (n + z2)
    # at 0 of n and n of n the bound is exact; rounding must not leave 1e-17 of it
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high
