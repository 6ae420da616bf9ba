"""Threads that share the work of one compiled call: phases of chunks, taken one at a time.

Whoever calls works too, and does everything where no helper comes in time: a helper that the system holds back is never
waited for, but for the chunk that it has in hand. Between calls helpers spin a moment, then sleep.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from cast_ray.models.native.vectors import numbers_at

# Places in the team's control block, int64 each, on cache lines of their own.
POSTED, OPEN, INSIDE, ASLEEP, JOB, KIND, SEMAPHORE = range(0, 7 * 8, 8)
CONTROL_SIZE = 8 * 8
# Pauses of 20 to 40 ns: the time to the next call while a draft goes on, not that between two rounds.
SPINS = 1500
# A phase's counters: the next chunk, and 8 places on the chunks done.
PHASE_SIZE = 16

_X86 = platform.machine() in ("x86_64", "AMD64")
_I64, _I32 = ir.IntType(64), ir.IntType(32)


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _I64.as_pointer())


@intrinsic
def atomic_add(context, address, value):  # type: ignore[no-untyped-def]
    """Add to the int64 at an address; what it was before."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _pointer(b, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def atomic_load(context, address):  # type: ignore[no-untyped-def]
    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.load_atomic(_pointer(b, args[0]), "seq_cst", 8)

    return types.int64(types.int64), code


@intrinsic
def atomic_store(context, address, value):  # type: ignore[no-untyped-def]
    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], _pointer(b, args[0]), "seq_cst", 8)
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _libc(name: str, takes_address: bool) -> Any:
    """A function of the C library by name: an address in, or nothing."""

    if takes_address:

        @intrinsic
        def call(context, address):  # type: ignore[no-untyped-def]
            def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
                kind = ir.FunctionType(_I32, [_I64])
                return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)

            return types.int32(types.int64), code

        return call

    @intrinsic
    def call_alone(context):  # type: ignore[no-untyped-def]
        def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(_I32, []), name), [])

        return types.int32(), code

    return call_alone


sem_wait, sem_post, sched_yield = _libc("sem_wait", True), _libc("sem_post", True), _libc("sched_yield", False)


@intrinsic
def pause(context):  # type: ignore[no-untyped-def]
    """What a loop that waits for another thread should do."""

    def code(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return _context.get_dummy_value()

    return types.void(), code


@njit(nogil=True)
def wait_for(address, value):  # type: ignore[no-untyped-def]
    """Until the int64 at an address is at least `value`."""
    spins = 0
    while atomic_load(address) < value:
        pause()
        spins += 1
        if spins > SPINS:
            sched_yield()


@njit(nogil=True)
def wait_for_none(address):  # type: ignore[no-untyped-def]
    """Until the int64 at an address is 0."""
    spins = 0
    while atomic_load(address) != 0:
        pause()
        spins += 1
        if spins > SPINS:
            sched_yield()


@njit(nogil=True)
def next_posted(control, last):  # type: ignore[no-untyped-def]
    """For a helper: the number of the next job after `last`, when it comes."""
    spins = 0
    while atomic_load(control + 8 * POSTED) == last:
        if spins < SPINS:
            pause()
            spins += 1
            continue
        atomic_add(control + 8 * ASLEEP, 1)
        # Whoever posts looks at the sleepers after posting: either it sees this one, or this one sees the job.
        if atomic_load(control + 8 * POSTED) == last:
            sem_wait(control + 8 * SEMAPHORE)
        atomic_add(control + 8 * ASLEEP, -1)
    return atomic_load(control + 8 * POSTED)


@njit(nogil=True)
def post(control, job, kind):  # type: ignore[no-untyped-def]
    """Offer a job to the helpers."""
    atomic_store(control + 8 * JOB, job)
    atomic_store(control + 8 * KIND, kind)
    number = atomic_load(control + 8 * POSTED) + 1
    atomic_store(control + 8 * OPEN, number)
    atomic_store(control + 8 * POSTED, number)
    for _ in range(atomic_load(control + 8 * ASLEEP)):
        sem_post(control + 8 * SEMAPHORE)


@njit(nogil=True)
def close(control):  # type: ignore[no-untyped-def]
    """Let no helper in any more, and wait for those inside."""
    atomic_store(control + 8 * OPEN, 0)
    wait_for_none(control + 8 * INSIDE)


@njit(nogil=True)
def clear_phases(counters, phases):  # type: ignore[no-untyped-def]
    places = numba.carray(numbers_at(counters), phases * PHASE_SIZE)
    for place in range(phases * PHASE_SIZE):
        places[place] = 0
