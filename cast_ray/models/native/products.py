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
# From so many rows on, a tile's weights are first written out as float32: taking them apart again for every five rows
# costs more.
MANY_ROWS = 11
_PAIR_BYTES = 4 * COLUMNS


def _few_rows(form: Form) -> Any:
    """`(weight, inputs, size, n, out)`: one tile, up to five rows at a time, straight from the packed weights."""
    one, two, three, four, five = (tile_product(form, rows) for rows in (1, 2, 3, 4, 5))
    step = form.step

    @njit(nogil=True)
    def rows(weight, inputs, size, n, out):  # type: ignore[no-untyped-def]
        row = 0
        while row < n:
            parts = (n - row + 4) // 5
            count = (n - row + parts - 1) // parts
            x, to = inputs + row * size * 4, out + row * _PAIR_BYTES
            if count == 1:
                one(weight, x, size * 4, size // step, to, _PAIR_BYTES)
            elif count == 2:
                two(weight, x, size * 4, size // step, to, _PAIR_BYTES)
            elif count == 3:
                three(weight, x, size * 4, size // step, to, _PAIR_BYTES)
            elif count == 4:
                four(weight, x, size * 4, size // step, to, _PAIR_BYTES)
            else:
                five(weight, x, size * 4, size // step, to, _PAIR_BYTES)
            row += count

    return rows


def _many_rows(form: Form) -> Any:
    """As `_few_rows`, six rows at a time over float32 values written to `scratch` `[in, 16]` before."""
    values = tile_values(form)
    six, four, two, one = (tile_product(Form.FLOAT32, rows) for rows in (6, 4, 2, 1))
    step, plain = form.step, form is Form.FLOAT32

    @njit(nogil=True)
    def rows(weight, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        if plain:
            scratch = weight
        else:
            values(weight, size // step, scratch)
        row = 0
        while row < n:
            x, to = inputs + row * size * 4, out + row * _PAIR_BYTES
            if n - row >= 6:
                six(scratch, x, size * 4, size, to, _PAIR_BYTES)
                row += 6
            elif n - row >= 4:
                four(scratch, x, size * 4, size, to, _PAIR_BYTES)
                row += 4
            elif n - row >= 2:
                two(scratch, x, size * 4, size, to, _PAIR_BYTES)
                row += 2
            else:
                one(scratch, x, size * 4, size, to, _PAIR_BYTES)
                row += 1

    return rows


def _product(form: Form) -> Any:
    few, many = _few_rows(form), _many_rows(form)
    step, step_bytes = form.step, form.step_bytes

    @njit(nogil=True)
    def product(weight, pair, inputs, size, n, out, scratch):  # type: ignore[no-untyped-def]
        for tile in range(2):
            start = weight + (2 * pair + tile) * (size // step) * step_bytes
            if n < MANY_ROWS:
                few(start, inputs, size, n, out + tile * 4 * TILE)
            else:
                many(start, inputs, size, n, out + tile * 4 * TILE, scratch)

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
