"""Files are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cast_ray.training.files import read_json, sweep_parts, write_json, write_whole


def test_a_failed_write_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    assert read_json(path) is None
    write_json(path, {"a": 1})

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fail)
    assert read_json(path) == {"a": 1}
    assert [item.name for item in path.parent.iterdir()] == ["value.json"]


def test_parts_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = 2**22 + 12345  # beyond the largest process id
    names = [f".a.bin.{dead}.part", f".a.bin.{os.getpid()}.part", ".mine.part", "a.bin"]
    for name in names:
        (tmp_path / name).write_text("x")
    sweep_parts(tmp_path)
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(names[1:])
