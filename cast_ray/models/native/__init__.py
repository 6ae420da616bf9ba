"""Decoding on a CPU as compiled code: packed weights, one call for all layers, the same bits at every batch.

Compiled at first use by numba and kept in its cache; nothing needs a compiler at install time. Where numba is missing
or the system is another than Linux, `available` says no and PyTorch computes everything.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

logger = logging.getLogger(__name__)
# Set to 0 to compute with PyTorch alone.
SWITCH = "CAST_RAY_NATIVE"


@cache
def available() -> bool:
    """Whether compiled kernels can be used in this process. Compiles them when nobody has before: half a minute."""
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux":
        return False
    try:
        from cast_ray.models.native.keep import kept_in_home

        with kept_in_home():
            from cast_ray.models.native import kernels  # noqa: F401
    except ImportError as error:
        logger.info("no compiled kernels for the CPU: %s", error)
        return False
    except Exception as error:  # a compiler can fail in many ways, and none of them is worth an engine
        logger.warning("the CPU kernels could not be compiled, PyTorch computes everything: %s", error)
        return False
    return True
