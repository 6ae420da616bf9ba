"""One job at a time in an output folder of this machine. The system frees the lock when the process ends, however."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from cast_ray.batch.storage import Storage
from cast_ray.errors import InputError, describe

LOCK_FILE = ".cast-ray.lock"


@contextmanager
def only_job(output: Storage) -> Iterator[None]:
    """Raise InputError where another job writes to output. Object stores have no locks; there it checks nothing."""
    if not output.is_local:
        yield
        return
    new = not os.path.isdir(output.path)
    os.makedirs(output.path, exist_ok=True)
    file = os.path.join(output.path, LOCK_FILE)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        problem = "is being written to by another job"
        raise InputError(describe("output", output.shown, problem, "Wait for it, or name another folder")) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.unlink(file)
        if new and not os.listdir(output.path):
            os.rmdir(output.path)  # nothing came of the job
        os.close(handle)
