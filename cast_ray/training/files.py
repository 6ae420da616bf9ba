"""Files that are there whole or not at all: what makes every step of a training job safe to kill.

A file is written beside its place and renamed into it. Numbered shards are the unit of work that a kill can lose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary path, then move that file to `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        with part.open("rb") as handle:
            os.fsync(handle.fileno())
        part.chmod(0o644)  # some writers keep their files to themselves
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, lambda part: part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))


def read_json(path: Path) -> Any:
    """The value in `path`, or None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def shard_path(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"{number:05d}{suffix}"


def sweep_parts(folder: Path) -> None:
    """Delete what killed writers left; a part whose writer still runs stays."""
    for part in folder.rglob(".*.part"):
        try:
            os.kill(int(part.name.rsplit(".", 2)[1]), 0)
        except ProcessLookupError:
            part.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue  # not ours
