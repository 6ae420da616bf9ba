"""Calibration as a script, for `ray job submit --working-dir . -- python jobs/calibrate.py ...`.

The same as `cast-ray calibrate`; see `--help`. It measures the device of the node that it runs on.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("cast_ray") is None:
    # Submitted with its working directory rather than installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cast_ray.cli import main_calibrate

if __name__ == "__main__":
    main_calibrate()
