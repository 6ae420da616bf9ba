"""The training job as a script, for `ray job submit --working-dir . -- python jobs/train_drafter.py ...`.

The same as `cast-ray train-drafter`; see `--help`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("cast_ray") is None:
    # Submitted with its working directory rather than installed. Workers have that directory on their path already.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cast_ray.cli import main_train_drafter

if __name__ == "__main__":
    main_train_drafter()
