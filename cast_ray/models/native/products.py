"""A few columns of `inputs @ weight.T` at a time, over packed weights; see `forms` and `vectors`.

All functions are compiled, take addresses and run without the interpreter's lock.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from cast_ray.models.native.forms import TILE, Form
from cast_ray.models.native.stamp import STAMP
from cast_ray.models.native.vectors import tile_product, tile_values

# Columns that one call makes: a pair of tiles.
COLUMNS = 2 * TILE
# From so many rows on, a tile's weights are first written out as float32: taking them apart again for every four rows
# costs more.
MANY_ROWS = 8
_PAIR_BYTES = 4 * COLUMNS


def _few_rows(form: Form) -> Any:
    """`(weight, inputs, size, n, out)`: one to three rows of two tiles, and fours of rows."""
    one, two = tile_product(form, 1, 2), tile_product(form, 2, 2)
    three, four = tile_product(form, 3, 1), tile_product(form, 4, 1)
    step, step_bytes = form.step, form.step_bytes

    @njit(nogil=True)
    def rows(weight, inputs, size, n, out):  # type: ignore[no-untyped-def]
        steps = size // step
        tile_bytes = steps * step_bytes
        row = 0
        while n - row >= 4:
            x, to = inputs + row * size * 4, out + row * _PAIR_BYTES
            four(weight, tile_bytes, x, size * 4, steps, to, _PAIR_BYTES)
            four(weight + tile_bytes, tile_bytes, x, size * 4, steps, to + 4 * TILE, _PAIR_BYTES)
            row += 4
        x, to = inputs + row * size * 4, out + row * _PAIR_BYTES
        if n - row == 1:
            one(weight, tile_bytes, x, size * 4, steps, to, _PAIR_BYTES)
        elif n - row == 2:
            two(weight, tile_bytes, x, size * 4, steps, to, _PAIR_BYTES)
        elif n - row == 3:
            three(weight, tile_bytes, x, size * 4, steps, to, _PAIR_BYTES)
            three(weight + tile_bytes, tile_bytes, x, size * 4, steps, to + 4 * TILE, _PAIR_BYTES)

    return rows


def _many_rows(form: Form) -> Any:
    """As `_few_rows`, six rows at a time over float32 values written to `scratch` `[in, 16]` before."""
    values = tile_values(form)
    six, four = tile_product(Form.FLOAT32, 6, 1), tile_product(Form.FLOAT32, 4, 1)
    two, one = tile_product(Form.FLOAT32, 2, 1), tile_product(Form.FLOAT32, 1, 1)
    step, step_bytes, plain = form.step, form.step_bytes, form is Form.FLOAT32

    @njit(nogil=True)
    def rows(weight, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        steps = size // step
        for tile in range(2):
            start = weight + tile * steps * step_bytes
            if plain:
                scratch = start
            else:
                values(start, steps, scratch)
            row, to = 0, out + tile * 4 * TILE
            while n - row >= 6:
                six(scratch, 0, inputs + row * size * 4, size * 4, size, to + row * _PAIR_BYTES, _PAIR_BYTES)
                row += 6
            if n - row >= 4:
                four(scratch, 0, inputs + row * size * 4, size * 4, size, to + row * _PAIR_BYTES, _PAIR_BYTES)
                row += 4
            if n - row >= 2:
                two(scratch, 0, inputs + row * size * 4, size * 4, size, to + row * _PAIR_BYTES, _PAIR_BYTES)
                row += 2
            if n - row >= 1:
                one(scratch, 0, inputs + row * size * 4, size * 4, size, to + row * _PAIR_BYTES, _PAIR_BYTES)

    return rows


def _product(form: Form) -> Any:
    few, many = _few_rows(form), _many_rows(form)
    step, step_bytes = form.step, form.step_bytes

    @njit(nogil=True)
    def product(weight, pair, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        start = weight + pair * 2 * (size // step) * step_bytes
        if n < MANY_ROWS:
            few(start, inputs, size, n, out)
        else:
            many(start, inputs, size, n, out, scratch)

    return product


_float32, _bfloat16, _four_bits, _eight_bits = (_product(form) for form in Form)
# That of `call_product`.
_SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64)"


def _kept(stamp: int) -> dict[Form, int]:
    """Each form's product compiled by itself, to be called by its address: part of its callers, it would be compiled
    again with each of them. The condition always holds; see `stamp`."""

    @cfunc(_SIGNATURE, cache=True)
    def float32(weight, pair, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _float32(weight, pair, inputs, size, n, out, scratch)

    @cfunc(_SIGNATURE, cache=True)
    def bfloat16(weight, pair, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _bfloat16(weight, pair, inputs, size, n, out, scratch)

    @cfunc(_SIGNATURE, cache=True)
    def four_bits(weight, pair, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _four_bits(weight, pair, inputs, size, n, out, scratch)

    @cfunc(_SIGNATURE, cache=True)
    def eight_bits(weight, pair, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _eight_bits(weight, pair, inputs, size, n, out, scratch)

    functions = zip(Form, (float32, bfloat16, four_bits, eight_bits), strict=True)
    return {form: int(function.address) for form, function in functions}


# By form: the address of a function of `(weight, pair, inputs, size, n, out, scratch)`, which writes columns
# `32 * pair` and following of the product of `n` rows `[n, size]` into out `[n, 32]`, float32. weight: address of the
# packed bytes. scratch: room for `[size, 16]` float32.
PRODUCTS: dict[Form, int] = _kept(STAMP)


@intrinsic
def call_product(context, address, weight, pair, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
    """Call one of PRODUCTS."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 8), code
