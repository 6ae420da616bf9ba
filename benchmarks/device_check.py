"""Proves the device path on one GPU in minutes: backends, captured forwards, latencies and tokens a second.

    python benchmarks/device_check.py --prepare wheels                # where there is a network: the packages needed
    python benchmarks/device_check.py --wheels wheels --to out.json   # on the device, which needs none
    python benchmarks/device_check.py --tiny --to out.json            # all of it on tiny shapes, on any CPU

Every part runs in a process of its own with its own time, and saves after each result: a part that fails or is too
slow loses none of the others' results, nor its own earlier ones. Weights are random, of the shapes of Qwen3-8B and 4B;
acceptance is scripted at the paper's rates (`on_device/scripted.py`). What was not measured is not in the file.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # cast_ray, where it is not installed

from on_device import wheels

# Seconds that each part may take, of 470 in all; what one leaves over, the next may have.
BUDGETS = {"backends": 100.0, "splits": 25.0, "graphs": 45.0, "qwen3-8b": 225.0, "qwen3-4b": 75.0}
ALL_SECONDS = 470.0
LEAST_SECONDS = 20.0
TINY_SECONDS = 5.0


def run_part(name: str, seconds: float, into: Path, tiny: bool) -> None:
    """One part, in this process."""
    from on_device import decoding, equality, splitting
    from on_device.part import Part

    import cast_ray  # noqa: F401 - before PyTorch: it says how long OpenMP threads spin

    functions: dict[str, Callable[[Part], None]] = {
        "backends": equality.backends,
        "splits": splitting.measure,
        "graphs": equality.graphs,
        "qwen3-8b": lambda part: decoding.model(part, "qwen3-8b", decodes=True),
        "qwen3-4b": lambda part: decoding.model(part, "qwen3-4b", decodes=False),
    }
    part = Part(into, seconds, tiny)
    try:
        functions[name](part)
    except Exception as error:  # whatever fails, the other parts are worth having
        part.put("error", f"{type(error).__name__}: {error}")
        traceback.print_exc()
    part.put("seconds", time.monotonic() - part.began)


def in_process_of_its_own(name: str, seconds: float, into: Path, folder: Path | None) -> dict[str, Any]:
    """A part's results; those that it had saved where it died or had to be ended."""
    command = [sys.executable, __file__, "--part", name, "--seconds", str(seconds), "--to", str(into)]
    command += ["--wheels", str(folder)] if folder else []
    ending = None
    try:
        # Its own clock stops it between two measurements; this one if it hangs in one.
        code = subprocess.run(command, timeout=seconds + 15, check=False).returncode
        if code:
            ending = f"its process ended with {code}"
    except subprocess.TimeoutExpired:
        ending = f"ended after {seconds + 15:.0f} s"
    found = json.loads(into.read_text(encoding="utf-8")) if into.exists() else {}
    return found if ending is None else {**found, "error": found.get("error", ending)}


def check(to: Path, tiny: bool, only: list[str], folder: Path | None) -> dict[str, Any]:
    """Every part in its turn; the file is written after each."""
    began = time.monotonic()
    report: dict[str, Any] = {"tiny": tiny, "machine": machine(), "parts": {}}
    for name in only:
        left = ALL_SECONDS - (time.monotonic() - began)
        later = sum(seconds for other, seconds in BUDGETS.items() if other in only[only.index(name) + 1 :])
        seconds = TINY_SECONDS if tiny else max(min(BUDGETS[name], left), left - later)
        if left < LEAST_SECONDS:
            report["parts"][name] = {"skipped": f"{left:.0f} s are left of {ALL_SECONDS:.0f}"}
        else:
            print(f"{name}: at most {seconds:.0f} s", flush=True)
            with tempfile.TemporaryDirectory() as aside:
                into = Path(aside) / "part.json"
                if tiny:
                    run_part(name, seconds, into, tiny)
                    report["parts"][name] = json.loads(into.read_text(encoding="utf-8"))
                else:
                    report["parts"][name] = in_process_of_its_own(name, seconds, into, folder)
        report["seconds"] = time.monotonic() - began
        to.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return report


def machine() -> dict[str, Any]:
    """What the results belong to."""
    import torch
    import transformers

    known = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        known |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return known


def show(report: dict[str, Any]) -> None:
    """The table at the end."""
    for name, part in report["parts"].items():
        print(f"\n{name}: {part.get('skipped') or part.get('error') or _shown(part['seconds'])}")
        if "memory" in part:
            memory = part["memory"]
            speed = f"{memory['copy_bytes_per_s'] / 1e12:.3f} TB/s, the speed of a copy here"
            print(f"  weights {memory['weight_bytes'] / 1e9:.2f} GB, read in {memory['weights_ms']:.2f} ms at {speed}")
            print(f"  attention: {part['attention']['backend']} ({part['attention']['reason']})")
        if "split_from" in part:
            print(f"  split_from: {part['split_from']}")
        for table in ("cases", "split", "verify", "draft", "transformers_eager", "decode"):
            rows = part.get(table, [])
            if rows and "ok" in rows[0]:
                equal, worst = sum(row["ok"] for row in rows), max(row["apart"] for row in rows)
                print(f"  {table}: {equal} of {len(rows)} equal, at most {worst:.2g} apart")
            elif rows:
                print(f"  {table}")
                print("  " + " ".join(f"{heading:>14}" for heading in rows[0]))
                for row in rows:
                    print("  " + " ".join(f"{_shown(value):>14}" for value in row.values()))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="download the packages for the device, and end")
    parser.add_argument("--python", default="3.12", help="version of Python on the device, for --prepare")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages to use where they are missing")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--to", type=Path, default=Path("device-check.json"), help="file of the results")
    parser.add_argument("--only", nargs="+", choices=BUDGETS, default=list(BUDGETS), help="some of the parts")
    parser.add_argument("--part", choices=BUDGETS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.prepare:
        found = wheels.prepare(given.prepare, given.python)
        size = sum(wheel.stat().st_size for wheel in found)
        print("\n".join(f"{wheel.stat().st_size / 2**20:8.2f} MB  {wheel.name}" for wheel in found))
        print(f"{size / 2**20:8.2f} MB in {len(found)} wheels, of at most {wheels.MOST_BYTES >> 20}")
        sys.exit(0 if size <= wheels.MOST_BYTES else f"error: {given.prepare} holds more than can be carried along")
    if given.wheels:
        wheels.lay_out(given.wheels)
    if given.part:
        run_part(given.part, given.seconds, given.to, given.tiny)
        return
    report = check(given.to, given.tiny, given.only, given.wheels)
    show(report)
    failed = [name for name, part in report["parts"].items() if "error" in part or not _holds(part)]
    sys.exit(f"error: {', '.join(failed)} failed, see {given.to}" if failed else 0)


def _holds(part: dict[str, Any]) -> bool:
    rows = [row for table in part.values() if isinstance(table, list) for row in table]
    return all(row.get("ok", True) and row.get("exact", True) for row in rows)


if __name__ == "__main__":
    main()
