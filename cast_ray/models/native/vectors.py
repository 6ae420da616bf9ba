"""Vector instructions for compiled kernels: what numba cannot say, written as LLVM instructions.

Addresses are int64 numbers of bytes. A vector is eight float32, a column tile 16 outputs of a weight (see `forms`).
A tile's product adds its terms in the order of the inputs, each by one fused multiply-add into one sum, whatever the
number of rows: a row's outputs are the same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cast_ray.models.native.forms import GROUP, TILE, Form

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
_V8, _WIDE = ir.VectorType(_F32, 8), ir.VectorType(_I32, 8)
_ZERO = ir.Constant(_V8, [_F32(0.0)] * 8)
_HALVES = range(TILE // 8)


def _at(b: Any, kind: Any, address: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def _plus(b: Any, address: Any, offset: int) -> Any:
    return b.add(address, _I64(offset)) if offset else address


def _load(b: Any, kind: Any, address: Any, align: int = 1) -> Any:
    value = b.load(_at(b, kind, address))
    value.align = align
    return value


def _store(b: Any, value: Any, address: Any) -> None:
    b.store(value, _at(b, value.type, address)).align = 4


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    name = "llvm.fma.f32" if x.type == _F32 else "llvm.fma.v8f32"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(x.type, [x.type] * 3), name), [x, y, z])


def _shuffle(b: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [_I32(lane) for lane in lanes])
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _everywhere(b: Any, scalar: Any) -> Any:
    return _shuffle(b, b.insert_element(ir.Constant(_V8, ir.Undefined), scalar, _I32(0)), [0] * 8)


def _broadcast(b: Any, address: Any) -> Any:
    return _everywhere(b, _load(b, _F32, address, 4))


def _sum(b: Any, vector: Any) -> Any:
    for width in (4, 2, 1):
        vector = b.fadd(vector, _shuffle(b, vector, [(i + width) % 8 for i in range(8)]))
    return b.extract_element(vector, _I32(0))


def _from_half(b: Any, address: Any) -> Any:
    return b.fpext(_load(b, ir.VectorType(ir.HalfType(), 8), address), _V8)


def _function(b: Any, name: str, args: Any, body: Callable[[Any, Any], Any]) -> Any:
    """Call `body` as a function of its own: written out once in a module, not again wherever it is used."""
    functions = b.module.globals
    if name not in functions:
        shell = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [arg.type for arg in args]), name)
        shell.linkage = "linkonce_odr"
        shell.attributes.add("noinline")
        inside = ir.IRBuilder(shell.append_basic_block("entry"))
        body(inside, shell.args)
        inside.ret_void()
    return b.call(functions[name], args)


# Bytes of a line of memory, and how far ahead of its use a weight is asked for.
LINE, AHEAD = 64, 1920
# One step of a form: from the address of a tile's step, the two weight vectors of each of its inputs in turn.
Weights = Callable[[Any, Any], Iterator[list[Any]]]


def _float32(b: Any, base: Any) -> Iterator[list[Any]]:
    yield [_load(b, _V8, _plus(b, base, 32 * half), 4) for half in _HALVES]


def _bfloat16(b: Any, base: Any) -> Iterator[list[Any]]:
    found = []
    for half in _HALVES:
        bits = b.zext(_load(b, ir.VectorType(_I16, 8), _plus(b, base, 16 * half)), _WIDE)
        found.append(b.bitcast(b.shl(bits, ir.Constant(_WIDE, [_I32(16)] * 8)), _V8))
    yield found


def _four_bits(b: Any, base: Any) -> Iterator[list[Any]]:
    scales = [_from_half(b, _plus(b, base, 16 * half)) for half in _HALVES]
    least = [_from_half(b, _plus(b, base, 32 + 16 * half)) for half in _HALVES]
    low, shift = (ir.Constant(_WIDE, [_I32(number)] * 8) for number in (15, 4))
    for pair in range(GROUP // 2):
        raw = [
            b.zext(_load(b, ir.VectorType(_I8, 8), _plus(b, base, 64 + 16 * pair + 8 * half)), _WIDE)
            for half in _HALVES
        ]
        for codes in ([b.and_(eight, low) for eight in raw], [b.lshr(eight, shift) for eight in raw]):
            yield [_fma(b, b.sitofp(codes[h], _V8), scales[h], least[h]) for h in _HALVES]


def _eight_bits(b: Any, base: Any) -> Iterator[list[Any]]:
    scales = [_from_half(b, _plus(b, base, 16 * half)) for half in _HALVES]
    for place in range(GROUP):
        at = [_plus(b, base, 32 + 16 * place + 8 * half) for half in _HALVES]
        codes = [b.sext(_load(b, ir.VectorType(_I8, 8), address), _WIDE) for address in at]
        yield [b.fmul(b.sitofp(codes[h], _V8), scales[h]) for h in _HALVES]


_WEIGHTS: dict[Form, Weights] = {
    Form.FLOAT32: _float32,
    Form.BFLOAT16: _bfloat16,
    Form.FOUR_BITS: _four_bits,
    Form.EIGHT_BITS: _eight_bits,
}


def _fetch(b: Any, address: Any) -> None:
    """Ask for a line of memory that is read soon."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    b.call(function, [_at(b, _I8, address), _I32(0), _I32(3), _I32(1)])


def tile_product(form: Form, rows: int) -> Any:
    """A kernel `(weight, inputs, input_bytes, steps, outputs, output_bytes)`: one tile's outputs of `rows` rows.

    input_bytes, output_bytes: from row to row.
    """
    weights = _WEIGHTS[form]

    @intrinsic
    def kernel(context, weight, x, x_bytes, steps, out, out_bytes):  # type: ignore[no-untyped-def]
        def body(b: Any, args: Any) -> None:
            weight, x, x_bytes, steps, out, out_bytes = args
            sums = [[cgutils.alloca_once(b, _V8) for _ in _HALVES] for _ in range(rows)]
            for row_sums in sums:
                for sum_at in row_sums:
                    b.store(_ZERO, sum_at)
            inputs = [b.add(x, b.mul(x_bytes, _I64(row))) for row in range(rows)]
            with cgutils.for_range(b, steps) as loop:
                start = b.add(weight, b.mul(loop.index, _I64(form.step_bytes)))
                for line in range(0, form.step_bytes, LINE):
                    _fetch(b, _plus(b, start, line + AHEAD))
                here = [b.add(row, b.mul(loop.index, _I64(4 * form.step))) for row in inputs]
                for place, vectors in enumerate(weights(b, start)):
                    for row, row_sums in zip(here, sums, strict=True):
                        value = _broadcast(b, _plus(b, row, 4 * place))
                        for vector, sum_at in zip(vectors, row_sums, strict=True):
                            b.store(_fma(b, vector, value, b.load(sum_at)), sum_at)
            for row, row_sums in enumerate(sums):
                start = b.add(out, b.mul(out_bytes, _I64(row)))
                for half, sum_at in enumerate(row_sums):
                    _store(b, b.load(sum_at), _plus(b, start, 32 * half))

        def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            _function(b, f"cast_ray_product_{form.name}_{rows}", args, body)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 6), code

    return kernel


def tile_values(form: Form) -> Any:
    """A kernel `(weight, steps, out)` that writes one tile's weights as float32: `[in, 16]`."""
    weights = _WEIGHTS[form]

    @intrinsic
    def kernel(context, weight, steps, out):  # type: ignore[no-untyped-def]
        def body(b: Any, args: Any) -> None:
            weight, steps, out = args
            with cgutils.for_range(b, steps) as loop:
                base = b.add(weight, b.mul(loop.index, _I64(form.step_bytes)))
                to = b.add(out, b.mul(loop.index, _I64(form.step * 4 * TILE)))
                for place, vectors in enumerate(weights(b, base)):
                    for half, vector in enumerate(vectors):
                        _store(b, vector, _plus(b, to, 4 * TILE * place + 32 * half))

        def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            _function(b, f"cast_ray_values_{form.name}", args, body)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 3), code

    return kernel


def key_scores(rows: int) -> Any:
    """A kernel `(q0, q1, q2, q3, dim, keys, key_bytes, count, scale, out, out_bytes)`: scaled products with keys.

    The first `rows` of four query addresses against `count` keys, `key_bytes` apart; dim is a multiple of 32. Even and
    odd vectors have a sum each, so that one addition need not wait for the one before.
    """

    @intrinsic
    def kernel(context, q0, q1, q2, q3, dim, keys, key_bytes, count, scale, out, out_bytes):  # type: ignore[no-untyped-def]
        def body(b: Any, args: Any) -> None:
            queries, (dim, keys, key_bytes, count, scale, out, out_bytes) = args[:rows], args[4:]
            sums = [[cgutils.alloca_once(b, _V8) for _ in range(2)] for _ in range(rows)]
            with cgutils.for_range(b, count) as loop:
                key = b.add(keys, b.mul(key_bytes, loop.index))
                for pair in sums:
                    for place in pair:
                        b.store(_ZERO, place)
                with cgutils.for_range(b, b.udiv(dim, _I64(32))) as inner:
                    offset = b.mul(inner.index, _I64(128))
                    for part in range(4):
                        here = _plus(b, offset, 32 * part)
                        vector = _load(b, _V8, b.add(key, here), 4)
                        for query, pair in zip(queries, sums, strict=True):
                            place = pair[part % 2]
                            b.store(_fma(b, _load(b, _V8, b.add(query, here), 4), vector, b.load(place)), place)
                for row, (even, odd) in enumerate(sums):
                    to = b.add(b.add(out, b.mul(out_bytes, _I64(row))), b.mul(loop.index, _I64(4)))
                    _store(b, b.fmul(_sum(b, b.fadd(b.load(even), b.load(odd))), scale), to)

        def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            _function(b, f"cast_ray_scores_{rows}", args, body)
            return _context.get_dummy_value()

        kinds = [*[types.int64] * 8, types.float32, types.int64, types.int64]
        return types.void(*kinds), code

    return kernel


def add_values(vectors: int) -> Any:
    """A kernel `(weights, values, value_bytes, count, out, total)`: out += sum of weight x value, in order.

    `vectors` x 8 float32 a value, `value_bytes` apart. Returns total, a float32, and the weights added to it in order.
    """

    @intrinsic
    def kernel(context, weights, values, value_bytes, count, out, total):  # type: ignore[no-untyped-def]
        def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            weights, values, value_bytes, count, out, total = args
            sums = [cgutils.alloca_once(b, _V8) for _ in range(vectors)]
            for index, place in enumerate(sums):
                b.store(_load(b, _V8, _plus(b, out, 32 * index), 4), place)
            all_of = cgutils.alloca_once(b, _F32)
            b.store(total, all_of)
            with cgutils.for_range(b, count) as loop:
                weight = _load(b, _F32, b.add(weights, b.mul(loop.index, _I64(4))), 4)
                spread = _everywhere(b, weight)
                value = b.add(values, b.mul(value_bytes, loop.index))
                b.store(b.fadd(b.load(all_of), weight), all_of)
                for index, place in enumerate(sums):
                    vector = _load(b, _V8, _plus(b, value, 32 * index), 4)
                    b.store(_fma(b, vector, spread, b.load(place)), place)
            for index, place in enumerate(sums):
                _store(b, b.load(place), _plus(b, out, 32 * index))
            return b.load(all_of)

        kinds = [*[types.int64] * 5, types.float32]
        return types.float32(*kinds), code

    return kernel


@intrinsic
def fma(context, x, y, z):  # type: ignore[no-untyped-def]
    """x * y + z, rounded once. float32."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return _fma(b, *args)

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def float_of_bits(context, bits):  # type: ignore[no-untyped-def]
    """The float32 whose bits an int32 has."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], _F32)

    return types.float32(types.int32), code


@intrinsic
def floats_at(context, address):  # type: ignore[no-untyped-def]
    """A pointer to float32, for `numba.carray`."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return _at(b, _F32, args[0])

    return types.CPointer(types.float32)(types.int64), code


@intrinsic
def numbers_at(context, address):  # type: ignore[no-untyped-def]
    """A pointer to int64, for `numba.carray`."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return _at(b, _I64, args[0])

    return types.CPointer(types.int64)(types.int64), code


@intrinsic
def byte_at(context, address):  # type: ignore[no-untyped-def]
    """The byte at an address, as int64."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.zext(_load(b, _I8, args[0]), _I64)

    return types.int64(types.int64), code
