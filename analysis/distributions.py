"""Distribution functions that the checks need, on numpy alone."""

from __future__ import annotations

import math
from functools import lru_cache

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


def student_cdf(t: float, freedom: float) -> float:
    """P(T <= t) for Student's t, of any positive number of degrees of freedom, whole or not (DLMF 8.17, A&S 26.7.1)."""
    if math.isinf(t):
        return 0.0 if t < 0 else 1.0
    tail = 0.5 * beta_cdf(freedom / (freedom + t * t), freedom / 2, 0.5)
    return tail if t < 0 else 1.0 - tail


@lru_cache(maxsize=4096)
def student_quantile(share: float, freedom: float) -> float:
    """The t that `share` of Student's t lies below, to 1e-10, by halving `student_cdf`."""
    if share < 0.5:
        return -student_quantile(1 - share, freedom)
    high = 1.0
    while student_cdf(high, freedom) < share:
        high *= 2
    low = 0.0
    while high - low > 1e-10 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def beta_cdf(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22, modified Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - beta_cdf(1 - x, b, a)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / a * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d_1 / (1 + d_2 / (1 + ...)))."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, TERMS_LIMIT):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < PRECISION * 4:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY
