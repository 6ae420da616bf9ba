"""What a batch job costs beside its engines: seconds a row, memory of every process, and the start of a resumed job.

Tiny rows through an engine that answers at once, so that all of the time is the job's own. Prints one JSON object.

    python benchmarks/batch_overhead.py --rows 100000
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from tests import fake_engine

MEGABYTE = 2**20


class InstantEngine(fake_engine.FakeEngine):
    """Answers without a wait."""

    async def _work(self, tokens: int) -> None:
        return None


class MemoryWatch(threading.Thread):
    """The largest resident memory of every Ray worker of this machine, by what the worker does."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = {}
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(1.0):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
                    pages = int((folder / "statm").read_text().split()[1])
                    ours = name.startswith("ray::") and is_below(int(folder.name), os.getpid())
                except (OSError, ValueError, IndexError):
                    continue  # it has ended meanwhile
                if ours:
                    name = name.split("(")[0]
                    self.peaks[name] = max(self.peaks.get(name, 0), pages * resource.getpagesize())

    def stop(self) -> dict[str, int]:
        self._over.set()
        self.join()
        return {name: round(peak / MEGABYTE) for name, peak in sorted(self.peaks.items())}


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process descends from another: others may run Ray on this machine too."""
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def timed(config: JobConfig) -> tuple[float, dict[str, Any]]:
    began = time.monotonic()
    summary = run_job(config, InstantEngine, Console(quiet=True))
    return time.monotonic() - began, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--cpus", type=int, default=2)
    options = parser.parse_args()
    ray.cloudpickle.register_pickle_by_value(fake_engine)
    ray.init(
        address="local",
        num_cpus=options.cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=256 * MEGABYTE,
    )
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out"
        with source.open("w") as file:
            for number in range(options.rows):
                file.write(json.dumps({"id": f"row-{number:09d}", "prompt": f"label row {number}"}) + "\n")
        config = JobConfig(
            input=str(source),
            output=str(output),
            batch_size=options.batch_size,
            engine={"max_batch_size": 64},
            pool={"replicas": 2},
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        watch = MemoryWatch()
        watch.start()
        total, summary = timed(config)
        workers = watch.stop()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        parts = sorted(output.glob("part-*.parquet"))
        nothing_left, _ = timed(config)
        # Half of the parts again: from the command to engines that have work, most of it Ray's own start of actors.
        for part in parts[::2]:
            part.unlink()
        _, resumed = timed(config)
    ray.shutdown()
    print(
        json.dumps(
            {
                "rows": options.rows,
                "batch_size": options.batch_size,
                "seconds": round(total, 1),
                "seconds_generating": round(summary["seconds"]["generate"], 1),
                "ms_a_row": round(1000 * summary["seconds"]["generate"] / options.rows, 3),
                "driver_mb_before": round(before),
                "driver_mb_peak": round(after),
                "worker_mb_peak": workers,
                "parts": len(parts),
                "nothing_left_seconds": round(nothing_left, 2),
                "resume_rows": resumed["rows_now"],
                "resume_start_seconds": round(resumed["seconds"]["start"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
