"""What the driver does with answered blocks: hold the job to its limits of errors, and write parts as rows come in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from cast_ray.batch.parts import Parts
from cast_ray.errors import EngineError

# A part is written when it has so many rows, or so much text, or the last one is so long ago. That time grows with the
# job, or one that runs for days would leave as many files as it had moments.
PART_ROWS = 1024
PART_BYTES = 64 * 2**20
PART_SECONDS = 5.0
_LONGEST_WAIT_S = 60.0
_SHARE_OF_TIME = 0.02
# Rows from which on a rate of errors is one.
_RATE_FROM = 100


class PartWriter:
    """Gathers blocks into parts. What is gathered is lost when the process is killed, and done again.

    One thread adds and another may close.
    """

    def __init__(self, parts: Parts, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._began = self._written = clock()
        self._held: list[pa.Table] = []
        self._rows = 0
        self._bytes = 0
        self._open = True
        self._lock = threading.RLock()

    def add(self, table: pa.Table) -> None:
        if not len(table):
            return
        now = self._clock()
        with self._lock:
            self._held.append(table)
            self._rows += len(table)
            self._bytes += table.nbytes
            wait = min(_LONGEST_WAIT_S, max(PART_SECONDS, _SHARE_OF_TIME * (now - self._began)))
            if self._rows >= PART_ROWS or self._bytes >= PART_BYTES or now - self._written >= wait:
                self.flush()

    def flush(self) -> None:
        """Write what is held; nothing after `close`."""
        with self._lock:
            if self._held and self._open:
                self._parts.append(pa.concat_tables(self._held))
            self._held, self._rows, self._bytes, self._written = [], 0, 0, self._clock()

    def close(self) -> None:
        """The last flush. What a thread that was left behind still adds is not written."""
        with self._lock:
            self.flush()
            self._open = False


class ErrorLimits:
    """Whether the rows that failed end the job. name_columns: those that tell people which row it was. rows, failed: of
    earlier runs."""

    def __init__(
        self,
        on_error: Literal["continue", "fail"],
        most: float | None,
        name_columns: Sequence[str],
        rows: int = 0,
        failed: int = 0,
    ) -> None:
        self._stop = on_error == "fail"
        self._most = most
        self._name_columns = name_columns
        self._rows = rows
        self._failed = failed

    def passed(self, table: pa.Table) -> tuple[pa.Table, EngineError | None]:
        """The rows to write, and what ends the job after them. With `fail` failed rows are not written, so the next
        run meets them again."""
        errors = pc.is_valid(table["error"])
        failed = pc.sum(errors).as_py() or 0
        self._rows += len(table)
        self._failed += failed
        if self._stop and failed:
            row = table.filter(errors).slice(0, 1).select([*self._name_columns, "error"]).to_pylist()[0]
            name = ", ".join(f"{column}={row[column]!r}" for column in self._name_columns if row[column] is not None)
            message = f"row {name} failed: {row['error']}. What is answered is kept: --on-error continue goes on"
            return table.filter(pc.invert(errors)), EngineError(message)
        return table, self.verdict(_RATE_FROM)

    def verdict(self, least: int = 1) -> EngineError | None:
        """The end of the job where the rate is too high, of at least so many rows."""
        if self._most is None or self._rows < least or self._failed <= self._most * self._rows:
            return None
        share = f"{self._failed} of {self._rows} rows failed, more than max_error_rate={self._most:g}"
        return EngineError(f"{share}. See their column error; --retry-errors runs them again")
