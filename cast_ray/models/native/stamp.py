"""A number for the sources of the compiled kernels, so that numba's cache never gives back what older ones made.

numba looks at the file of the function that it keeps, not at the files of those called from it. It does look at the
values a function closes over: kept functions are made inside a function of the stamp, and use it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def _stamp() -> int:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:6])


STAMP: int = _stamp()
