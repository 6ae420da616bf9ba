"""Attention of a few new tokens over the paged pool, one key head of one request and four queries at a time.

A query's scores, their weights and the sum over values are made in the order of the keys, each key's terms in the order
of the dimensions, so that a query's output is the same bits in a tree and alone.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from cast_ray.models.native.elementwise import exponential
from cast_ray.models.native.stamp import STAMP
from cast_ray.models.native.vectors import add_values, byte_at, floats_at, key_scores, numbers_at

# Places in the description of a segment (the new tokens of one request), int64 each.
START, LENGTH, CONTEXT, TABLE, MASK, MASK_WIDTH = range(6)
SEGMENT_SIZE = 6
# Queries that share one pass over the keys.
QUERIES = 4
# What a masked score is: its weight is 0, and it is a number.
_HIDDEN = -1e30

# That of `call_attend`.
_SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, float32, int64, int64, int64)"

_scores_1, _scores_2, _scores_3, _scores_4 = (key_scores(rows) for rows in (1, 2, 3, 4))
# 64 or 32 dimensions of a value at a time.
_values_8, _values_4 = (add_values(vectors) for vectors in (8, 4))


@njit(nogil=True)
def _place(start, fold, query, head, heads, dim):  # type: ignore[no-untyped-def]
    """Where a query lies in bytes: queries of a segment count tokens first, then the heads of one key head."""
    return (((start + query // fold) * heads + head * fold + query % fold) * dim) * 4


@njit(nogil=True)
def _run(table, done, total, page):  # type: ignore[no-untyped-def]
    """Tokens from `done` on whose slots follow each other: to the end of a run of neighbouring pages."""
    last = done // page
    while (last + 1) * page < total and table[last + 1] == table[last] + 1:
        last += 1
    return min((last + 1) * page, total) - done


@njit(nogil=True)
def _hide(scores, about, token):  # type: ignore[no-untyped-def]
    context, length, mask = about[CONTEXT], about[LENGTH], about[MASK]
    for other in range(length):
        seen = other <= token
        if mask != 0:
            seen = byte_at(mask + token * about[MASK_WIDTH] + other) != 0
        if not seen:
            scores[context + other] = numba.float32(_HIDDEN)


@njit(nogil=True)
def _weigh(scores):  # type: ignore[no-untyped-def]
    """Scores to weights that are not yet divided by their sum, in place."""
    greatest = scores[0]
    for key in range(scores.shape[0]):
        greatest = max(greatest, scores[key])
    for key in range(scores.shape[0]):
        scores[key] = exponential(scores[key] - greatest)


@njit(nogil=True, error_model="numpy")
def _sum_values(weights, table, total, page, values, slot_bytes, dim, out):  # type: ignore[no-untyped-def]
    result = numba.carray(floats_at(out), dim)
    weight_sum = numba.float32(0.0)
    part = 0
    while part < dim:
        left = dim - part
        width = 64 if left >= 64 else 32
        weight_sum = _sum_part(
            weights, table, total, page, values + part * 4, slot_bytes, width, result[part : part + width]
        )
        part += width
    for place in range(dim):
        result[place] /= weight_sum


@njit(nogil=True)
def _sum_part(weights, table, total, page, values, slot_bytes, width, result):  # type: ignore[no-untyped-def]
    for place in range(width):
        result[place] = numba.float32(0.0)
    weight_sum = numba.float32(0.0)
    done = 0
    while done < total:
        slots = _run(table, done, total, page)
        here = values + (table[done // page] * page + done % page) * slot_bytes
        out = result.ctypes.data
        if width == 64:
            weight_sum = _values_8(weights + done * 4, here, slot_bytes, slots, out, weight_sum)
        else:
            weight_sum = _values_4(weights + done * 4, here, slot_bytes, slots, out, weight_sum)
        done += slots
    return weight_sum


@njit(nogil=True)
def _attend(segment, block, head, keys, values, page, kv_heads, heads, dim, scale, queries, out, scratch):  # type: ignore[no-untyped-def]
    """The outputs of queries 4 * block and following of key head `head`.

    segment: address of its description. keys, values: addresses of one layer's slots `[slots, kv_heads, dim]`.
    page: slots a page. queries, out: `[T, heads, dim]`. scratch: room for `[4, keys]` float32 scores.
    """
    about = numba.carray(numbers_at(segment), SEGMENT_SIZE)
    table = numba.carray(numbers_at(about[TABLE]), 1)
    context = about[CONTEXT]
    total = context + about[LENGTH]
    fold = heads // kv_heads
    first = block * QUERIES
    count = min(QUERIES, about[LENGTH] * fold - first)
    slot_bytes = kv_heads * dim * 4
    line = total * 4
    start, last = about[START], first + count - 1
    q0 = queries + _place(start, fold, first, head, heads, dim)
    q1 = queries + _place(start, fold, min(first + 1, last), head, heads, dim)
    q2 = queries + _place(start, fold, min(first + 2, last), head, heads, dim)
    q3 = queries + _place(start, fold, min(first + 3, last), head, heads, dim)

    done = 0
    while done < total:
        slots = _run(table, done, total, page)
        here = keys + (table[done // page] * page + done % page) * slot_bytes + head * dim * 4
        to = scratch + done * 4
        if count == 4:
            _scores_4(q0, q1, q2, q3, dim, here, slot_bytes, slots, scale, to, line)
        elif count == 3:
            _scores_3(q0, q1, q2, q3, dim, here, slot_bytes, slots, scale, to, line)
        elif count == 2:
            _scores_2(q0, q1, q2, q3, dim, here, slot_bytes, slots, scale, to, line)
        else:
            _scores_1(q0, q1, q2, q3, dim, here, slot_bytes, slots, scale, to, line)
        done += slots

    for row in range(count):
        scores = numba.carray(floats_at(scratch + row * line), total)
        _hide(scores, about, (first + row) // fold)
        _weigh(scores)
        place = _place(start, fold, first + row, head, heads, dim)
        _sum_values(scratch + row * line, table, total, page, values + head * dim * 4, slot_bytes, dim, out + place)


def _kept(stamp: int) -> int:
    """Compiled by itself and called by its address, as the products are. The condition always holds; see `stamp`."""

    @cfunc(_SIGNATURE, cache=True)
    def attend(segment, block, head, keys, values, page, kv_heads, heads, dim, scale, queries, out, scratch):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _attend(segment, block, head, keys, values, page, kv_heads, heads, dim, scale, queries, out, scratch)

    return int(attend.address)


ATTEND: int = _kept(STAMP)


@intrinsic
def call_attend(  # type: ignore[no-untyped-def]
    context, address, segment, block, head, keys, values, page, kv_heads, heads, dim, scale, queries, out, scratch
):
    """Call ATTEND, whose address comes first."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [*[number] * 9, ir.FloatType(), *[number] * 3])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return _context.get_dummy_value()

    kinds = [*[types.int64] * 10, types.float32, *[types.int64] * 3]
    return types.void(*kinds), code
