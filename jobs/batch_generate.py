"""The batch job as a script, for `ray job submit --working-dir . -- python jobs/batch_generate.py ...`.

The same as `cast-ray generate`; see `--help`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The package of this checkout, installed or not. Workers look there too: Ray hands them the driver's path, and a
# submitted job's working directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cast_ray.cli import main_generate

if __name__ == "__main__":
    main_generate()
