"""The compiled calls: all decoder layers over a few tokens, or one linear layer, shared among the team's threads.

A call is an int64 array of addresses and sizes (its *job*), laid out by the constants below. Layers are those of Llama,
Mistral, Qwen 2 and Qwen 3: norm, attention with rotary heads, norm, gated MLP.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import njit

from cast_ray.models.native.attention import SEGMENT_SIZE, call_attend
from cast_ray.models.native.elementwise import gate, norm, rotate
from cast_ray.models.native.products import COLUMNS, call_product
from cast_ray.models.native.stamp import STAMP
from cast_ray.models.native.team import (
    INSIDE,
    JOB,
    KIND,
    OPEN,
    PHASE_SIZE,
    atomic_add,
    atomic_load,
    clear_phases,
    close,
    next_posted,
    post,
    wait_for,
)
from cast_ray.models.native.vectors import floats_at, numbers_at

# Kinds of jobs.
LAYERS, PRODUCT = 1, 2
# What both have. SCRATCH: rooms of SCRATCH_BYTES, one a thread. COUNTERS: PHASE_SIZE int64 a phase.
COUNTERS, SCRATCH, SCRATCH_BYTES, ROWS = range(4)
# A linear layer: its product's address, weight, bias (0: none) and what it has of inputs and outputs.
P_PRODUCT, P_WEIGHT, P_BIAS, P_IN, P_OUT, P_FROM, P_TO = range(4, 11)
PRODUCT_SIZE = 11
# Decoder layers. FEATURES: [taps, T, hidden] or 0. SLOTS, COS, SIN: as in a Step and in fused.SignedRotary.
(
    SIZE,
    HEADS,
    KV_HEADS,
    DIM,
    INNER,
    COUNT,
    TABLE,
    HIDDEN,
    NORMED,
    QUERIES_AT,
    ATTENDED,
    ACTIVE,
    SLOTS,
    COS,
    SIN,
    SEGMENTS,
    UNITS,
    UNIT_COUNT,
    CACHE,
    CACHE_HALF,
    PAGE,
    FEATURES,
    NUMBERS,
    FINAL_NORM,
    ATTEND_AT,
) = range(4, 29)
JOB_SIZE = 29
# One row of TABLE a layer. Products are three: function, weight, bias; norms are addresses, 0 for none. TAP: -1 for
# none.
L_NORM, L_QKV, L_Q_NORM, L_K_NORM, L_OUT, L_NORM_2, L_GATE, L_UP, L_DOWN, L_TAP = 0, 1, 4, 5, 6, 9, 10, 13, 16, 19
LAYER_SIZE = 20
# NUMBERS, float32: the attention's scale and the norms' epsilon.
N_SCALE, N_EPS = 0, 1
PHASES_A_LAYER = 7


@njit(nogil=True)
def _floats(address, count):  # type: ignore[no-untyped-def]
    return numba.carray(floats_at(address), count)


@njit(nogil=True)
def _copy(source, target, count):  # type: ignore[no-untyped-def]
    """`count` float32 between addresses. A loop: numba compiles an assigned slice several seconds longer."""
    values, places = _floats(source, count), _floats(target, count)
    for place in range(count):
        places[place] = values[place]


@njit(nogil=True)
def _next(counter):  # type: ignore[no-untyped-def]
    return atomic_add(counter, 1)


@njit(nogil=True)
def _done(counter, mine, chunks):  # type: ignore[no-untyped-def]
    """Say how many chunks of a phase this thread did, and wait for the others'."""
    if mine > 0:
        atomic_add(counter + 64, mine)
    wait_for(counter + 64, chunks)


@njit(nogil=True)
def _columns(layer, place, pair, inputs, size, rows, tile, scratch):  # type: ignore[no-untyped-def]
    """Columns `32 * pair` and on of a layer's product, bias added, in `tile` `[rows, 32]`."""
    call_product(layer[place], layer[place + 1], pair, inputs, size, rows, tile, scratch)
    if layer[place + 2] != 0:
        bias = _floats(layer[place + 2] + pair * COLUMNS * 4, COLUMNS)
        for row in range(rows):
            found = _floats(tile + row * COLUMNS * 4, COLUMNS)
            for column in range(COLUMNS):
                found[column] += bias[column]


@njit(nogil=True)
def _norms(counter, job, weight, tap, rows, size):  # type: ignore[no-untyped-def]
    """Norm the hidden states' rows; a tapped layer's are kept on the way, as they are."""
    eps = _floats(job[NUMBERS], 2)[N_EPS]
    scale = _floats(weight, size)
    mine = 0
    row = _next(counter)
    while row < rows:
        hidden = _floats(job[HIDDEN] + row * size * 4, size)
        if tap >= 0:
            _copy(job[HIDDEN] + row * size * 4, job[FEATURES] + (tap * rows + row) * size * 4, size)
        norm(hidden, scale, eps, _floats(job[NORMED] + row * size * 4, size))
        mine += 1
        row = _next(counter)
    _done(counter, mine, rows)


@njit(nogil=True)
def _heads(counter, job, layer, index, rows, size, scratch):  # type: ignore[no-untyped-def]
    """Query, key and value heads, turned, the latter two written to the pool; a chunk is one head of all rows."""
    heads, kv_heads, dim = job[HEADS], job[KV_HEADS], job[DIM]
    eps = _floats(job[NUMBERS], 2)[N_EPS]
    slots = numba.carray(numbers_at(job[SLOTS]), rows)
    keys = job[CACHE] + index * 2 * job[CACHE_HALF]
    tile, rest = scratch, scratch + rows * COLUMNS * 4
    chunks = heads + 2 * kv_heads
    mine = 0
    chunk = _next(counter)
    while chunk < chunks:
        for part in range(dim // COLUMNS):
            _columns(layer, L_QKV, chunk * dim // COLUMNS + part, job[NORMED], size, rows, tile, rest)
            for row in range(rows):
                if chunk < heads:
                    to = job[QUERIES_AT] + (row * heads + chunk) * dim * 4
                elif chunk < heads + kv_heads:
                    to = keys + (slots[row] * kv_heads + chunk - heads) * dim * 4
                else:
                    to = keys + job[CACHE_HALF] + (slots[row] * kv_heads + chunk - heads - kv_heads) * dim * 4
                _copy(tile + row * COLUMNS * 4, to + part * COLUMNS * 4, COLUMNS)
        if chunk < heads + kv_heads:
            scale = layer[L_Q_NORM] if chunk < heads else layer[L_K_NORM]
            for row in range(rows):
                if chunk < heads:
                    at = job[QUERIES_AT] + (row * heads + chunk) * dim * 4
                else:
                    at = keys + (slots[row] * kv_heads + chunk - heads) * dim * 4
                head = _floats(at, dim)
                if scale != 0:
                    norm(head, _floats(scale, dim), eps, head)
                rotate(head, _floats(job[COS] + row * dim * 4, dim), _floats(job[SIN] + row * dim * 4, dim))
        mine += 1
        chunk = _next(counter)
    _done(counter, mine, chunks)


@njit(nogil=True)
def _attention(counter, job, index, scratch):  # type: ignore[no-untyped-def]
    """A chunk is a unit: (segment, first block of queries, blocks); all key heads of it."""
    heads, kv_heads, dim = job[HEADS], job[KV_HEADS], job[DIM]
    scale = _floats(job[NUMBERS], 2)[N_SCALE]
    keys = job[CACHE] + index * 2 * job[CACHE_HALF]
    units = numba.carray(numbers_at(job[UNITS]), job[UNIT_COUNT] * 3)
    chunks = job[UNIT_COUNT] * kv_heads
    mine = 0
    chunk = _next(counter)
    while chunk < chunks:
        unit, head = chunk // kv_heads, chunk % kv_heads
        segment = job[SEGMENTS] + units[3 * unit] * SEGMENT_SIZE * 8
        for block in range(units[3 * unit + 1], units[3 * unit + 2]):
            call_attend(
                job[ATTEND_AT], segment, block, head, keys, keys + job[CACHE_HALF], job[PAGE], kv_heads, heads, dim,
                scale, job[QUERIES_AT], job[ATTENDED], scratch,
            )  # fmt: skip
        mine += 1
        chunk = _next(counter)
    _done(counter, mine, chunks)


@njit(nogil=True)
def _add_product(counter, job, layer, place, inputs, inner, rows, scratch):  # type: ignore[no-untyped-def]
    """hidden += inputs @ weight.T, in place; a chunk is 32 columns."""
    size = job[SIZE]
    tile, rest = scratch, scratch + rows * COLUMNS * 4
    chunks = (size + COLUMNS - 1) // COLUMNS
    mine = 0
    pair = _next(counter)
    while pair < chunks:
        _columns(layer, place, pair, inputs, inner, rows, tile, rest)
        width = min(COLUMNS, size - pair * COLUMNS)
        for row in range(rows):
            hidden = _floats(job[HIDDEN] + (row * size + pair * COLUMNS) * 4, width)
            found = _floats(tile + row * COLUMNS * 4, width)
            for column in range(width):
                hidden[column] += found[column]
        mine += 1
        pair = _next(counter)
    _done(counter, mine, chunks)


@njit(nogil=True)
def _gated(counter, job, layer, rows, size, scratch):  # type: ignore[no-untyped-def]
    """silu(gate) * up; a chunk is 32 columns of both."""
    inner = job[INNER]
    gates, ups, rest = scratch, scratch + rows * COLUMNS * 4, scratch + 2 * rows * COLUMNS * 4
    chunks = (inner + COLUMNS - 1) // COLUMNS
    mine = 0
    pair = _next(counter)
    while pair < chunks:
        _columns(layer, L_GATE, pair, job[NORMED], size, rows, gates, rest)
        _columns(layer, L_UP, pair, job[NORMED], size, rows, ups, rest)
        width = min(COLUMNS, inner - pair * COLUMNS)
        for row in range(rows):
            gate(
                _floats(gates + row * COLUMNS * 4, width),
                _floats(ups + row * COLUMNS * 4, width),
                _floats(job[ACTIVE] + (row * inner + pair * COLUMNS) * 4, width),
            )
        mine += 1
        pair = _next(counter)
    _done(counter, mine, chunks)


@njit(nogil=True)
def _run_layers(job, scratch):  # type: ignore[no-untyped-def]
    rows, size, count = job[ROWS], job[SIZE], job[COUNT]
    counter, step = job[COUNTERS], PHASE_SIZE * 8
    inner = job[HEADS] * job[DIM]
    tap = -1
    for index in range(count):
        layer = numba.carray(numbers_at(job[TABLE] + index * LAYER_SIZE * 8), LAYER_SIZE)
        _norms(counter, job, layer[L_NORM], tap, rows, size)
        _heads(counter + step, job, layer, index, rows, size, scratch)
        _attention(counter + 2 * step, job, index, scratch)
        _add_product(counter + 3 * step, job, layer, L_OUT, job[ATTENDED], inner, rows, scratch)
        _norms(counter + 4 * step, job, layer[L_NORM_2], -1, rows, size)
        _gated(counter + 5 * step, job, layer, rows, size, scratch)
        _add_product(counter + 6 * step, job, layer, L_DOWN, job[ACTIVE], job[INNER], rows, scratch)
        tap = layer[L_TAP]
        counter += PHASES_A_LAYER * step
    _norms(counter, job, job[FINAL_NORM], tap, rows, size)


@njit(nogil=True)
def _run_product(job, scratch):  # type: ignore[no-untyped-def]
    rows, size, columns = job[ROWS], job[P_IN], job[P_OUT]
    tile, rest = scratch, scratch + rows * COLUMNS * 4
    chunks = (columns + COLUMNS - 1) // COLUMNS
    mine = 0
    pair = _next(job[COUNTERS])
    while pair < chunks:
        _columns(job, P_PRODUCT, pair, job[P_FROM], size, rows, tile, rest)
        width = min(COLUMNS, columns - pair * COLUMNS)
        for row in range(rows):
            _copy(tile + row * COLUMNS * 4, job[P_TO] + (row * columns + pair * COLUMNS) * 4, width)
        mine += 1
        pair = _next(job[COUNTERS])
    _done(job[COUNTERS], mine, chunks)


@njit(nogil=True)
def _run(kind, address, thread):  # type: ignore[no-untyped-def]
    if kind == LAYERS:
        job = numba.carray(numbers_at(address), JOB_SIZE)
        _run_layers(job, job[SCRATCH] + thread * job[SCRATCH_BYTES])
    else:
        job = numba.carray(numbers_at(address), PRODUCT_SIZE)
        _run_product(job, job[SCRATCH] + thread * job[SCRATCH_BYTES])


def _make(stamp: int) -> Any:
    @njit("void(int64, int64, int64, int64, int64)", nogil=True, cache=True)
    def entry(control, kind, job, phases, thread):  # type: ignore[no-untyped-def]
        """thread 0: run a job with the team's helpers; control 0: alone. Another: help with every job, for good.

        One function for both, as two would be compiled one after the other.
        """
        last = numba.int64(0 * stamp)
        while thread > 0:
            last = next_posted(control, last)
            atomic_add(control + 8 * INSIDE, 1)
            if atomic_load(control + 8 * OPEN) == last:
                kind, job = atomic_load(control + 8 * KIND), atomic_load(control + 8 * JOB)
                _run(kind, job, thread)
            atomic_add(control + 8 * INSIDE, -1)
        clear_phases(numba.carray(numbers_at(job), 4)[COUNTERS], phases)
        if control != 0:
            post(control, job, kind)
        _run(kind, job, 0)
        if control != 0:
            close(control)

    return entry


enter = _make(STAMP)
