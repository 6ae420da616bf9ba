"""The paths that a job was given: whether they are local, and whether an output can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cast_ray.errors import InputError, describe


def check_local(field: str, path: str) -> None:
    """Raise InputError for a URL, which would otherwise be taken for a strange local path."""
    if "://" in path:
        remedy = "Mount it, or copy it to a folder: only local paths are read and written for now"
        raise InputError(describe(field, path, "is not a local path", remedy))


def check_writable(output: Path) -> None:
    """Raise InputError where the folder is not there and cannot be made, or nothing can be written into it."""
    try:
        nearest = next(folder for folder in (output, *output.parents) if folder.exists())
        if not nearest.is_dir():
            problem = "is a file" if nearest == output else f"lies below {nearest}, which is a file"
            raise InputError(describe("output", str(output), problem, "Name a folder"))
        # Tried rather than asked for: permissions say nothing of quotas, or of file systems that take no files.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise InputError(describe("output", str(output), problem, "Name a folder that you may write to")) from None
