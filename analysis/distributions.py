"""Distribution functions that the checks need, on numpy alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TERMS_LIMIT = 200_000
"""Both expansions of the gamma function need about sqrt(shape) terms; shapes here are at most 10,000."""
PRECISION = 1e-15
TINY = 1e-300


def kolmogorov_survival(x: float) -> float:
    """P(K > x) for Kolmogorov's limiting distribution (Kolmogorov 1933; DLMF 20.10 links its two forms).

    Above 1 by 2 sum (-1)**(k-1) exp(-2 k**2 x**2), below by the theta-transformed series, each of which needs a
    handful of terms on its side.
    """
    if x <= 0:
        return 1.0
    if x < 1:
        terms = (math.exp(-((2 * k - 1) ** 2) * math.pi**2 / (8 * x * x)) for k in range(1, 6))
        return 1.0 - math.sqrt(2 * math.pi) / x * math.fsum(terms)
    return 2.0 * math.fsum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 8))


def gamma_cdf(x: Floats, shape: float) -> Floats:
    """Regularised lower incomplete gamma function P(shape, x), the CDF of a gamma variate of scale 1.

    By the power series (DLMF 8.11.4) below shape + 1 and by the continued fraction (DLMF 8.9.2, evaluated with the
    modified Lentz algorithm, Thompson and Barnett 1986) above, which is where each of them converges fast.
    """
    result = np.zeros_like(x, dtype=np.float64)
    low = (x > 0) & (x < shape + 1)
    high = x >= shape + 1
    if low.any():
        result[low] = _series(x[low], shape)
    if high.any():
        result[high] = 1.0 - _fraction(x[high], shape)
    return result


def _series(x: Floats, shape: float) -> Floats:
    """P = x**a e**-x / Gamma(a + 1) * sum x**n / ((a + 1) ... (a + n))."""
    term = np.ones_like(x)
    total = np.ones_like(x)
    for n in range(1, TERMS_LIMIT):
        term = term * x / (shape + n)
        total += term
        if np.all(term < total * PRECISION):
            break
    front: Floats = np.exp(shape * np.log(x) - x - math.lgamma(shape + 1))
    return total * front


def _fraction(x: Floats, shape: float) -> Floats:
    """Q = x**a e**-x / Gamma(a) * 1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / (x + 5 - a - ...)))."""
    b = x + 1 - shape
    c = np.full_like(x, 1 / TINY)
    d = 1 / b
    value = d.copy()
    for n in range(1, TERMS_LIMIT):
        numerator = -n * (n - shape)
        b = b + 2
        d = numerator * d + b
        d = 1 / np.where(np.abs(d) < TINY, TINY, d)
        c = b + numerator / c
        c = np.where(np.abs(c) < TINY, TINY, c)
        change = c * d
        value *= change
        if np.all(np.abs(change - 1) < PRECISION * 4):
            break
    front: Floats = np.exp(shape * np.log(x) - x - math.lgamma(shape))
    return value * front
