"""Functions of single numbers and of rows for compiled kernels, float32. A row's result depends on that row alone."""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import njit

from cast_ray.models.native.vectors import float_of_bits, fma

_f = np.float32
# exp(x) = 2^n * exp(r), n the nearest whole number to x / ln 2: |r| <= ln 2 / 2, where seven terms of the series reach
# float32's precision. ln 2 in two parts, the first short, so that n * ln 2 loses nothing.
_LOG2_E, _LN2_HIGH, _LN2_LOW = _f(1.4426950408889634), _f(0.693359375), _f(-2.12194440e-4)
_TERMS = tuple(_f(1.0 / math.factorial(n)) for n in range(7, 1, -1))
_T7, _T6, _T5, _T4, _T3, _T2 = _TERMS
# Added and taken away again, it rounds to a whole number: 1.5 * 2^23.
_ROUND = _f(12582912.0)
_LEAST, _MOST = _f(-87.0), _f(88.0)
_ONE, _NONE = _f(1.0), _f(0.0)


@njit(nogil=True)
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) within two units of the last place; exactly 0 below -87, where float32 nearly ends. x at most 88."""
    inside = min(max(x, _LEAST), _MOST)
    whole = fma(inside, _LOG2_E, _ROUND) - _ROUND
    rest = fma(whole, -_LN2_HIGH, inside)
    rest = fma(whole, -_LN2_LOW, rest)
    series = fma(_T7, rest, _T6)
    series = fma(series, rest, _T5)
    series = fma(series, rest, _T4)
    series = fma(series, rest, _T3)
    series = fma(series, rest, _T2)
    series = fma(series, rest * rest, rest + _ONE)
    power = float_of_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    return series * power if x >= _LEAST else _NONE


# numpy's division by zero is a number; Python's is an exception, and a loop that may raise is not vectorised.
@njit(nogil=True, error_model="numpy")
def gate(gates, ups, out):  # type: ignore[no-untyped-def]
    """out = silu(gates) * ups, rows of like length."""
    for place in range(out.shape[0]):
        value = gates[place]
        out[place] = value / (_ONE + exponential(-value)) * ups[place]


@njit(nogil=True, fastmath={"reassoc"})
def square_sum(row):  # type: ignore[no-untyped-def]
    total = _NONE
    for place in range(row.shape[0]):
        total += row[place] * row[place]
    return total


@njit(nogil=True, error_model="numpy")
def norm(row, weight, eps, out):  # type: ignore[no-untyped-def]
    """Root-mean-square norm of one row; out may be the row."""
    size = row.shape[0]
    scale = _ONE / np.sqrt(square_sum(row) / numba.float32(size) + eps)
    for place in range(size):
        out[place] = weight[place] * (row[place] * scale)


@njit(nogil=True)
def rotate(row, cos, sin):  # type: ignore[no-untyped-def]
    """Rotary embedding of one head in place; sin carries the sign of the half turn (see `fused.SignedRotary`)."""
    half = row.shape[0] // 2
    for place in range(half):
        low, high = row[place], row[place + half]
        row[place] = low * cos[place] + high * sin[place]
        row[place + half] = high * cos[place + half] + low * sin[place + half]
