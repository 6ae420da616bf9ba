"""Parts are the checkpoint: whole or absent, the newest row holds, and nothing is lost at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from cast_ray.batch.columns import append_outputs
from cast_ray.batch.names import among, digests, repeats
from cast_ray.batch.parts import PartFormat, Parts
from cast_ray.batch.storage import Storage
from cast_ray.batch.writer import PART_SECONDS, ErrorLimits, PartWriter
from cast_ray.pool.rows import RowAnswer

KINDS: tuple[PartFormat, ...] = ("parquet", "jsonl")


def block(*rows: tuple[Any, str | None]) -> pa.Table:
    """Rows of (id, text); a row of text None has failed."""
    answers = [
        RowAnswer(text, "stop", 3, 2, 1) if text is not None else RowAnswer.failed("Kind", "why") for _, text in rows
    ]
    return append_outputs(pa.table({"id": [name for name, _ in rows]}), [[answer] for answer in answers])


def texts(parts: Parts) -> dict[Any, str | None]:
    rows = list(parts.all_rows(["id", "generated_text"]))
    found = {row["id"]: row["generated_text"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(params=KINDS)
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Parts:
    return Parts(Storage.of("output", str(tmp_path / "out")), request.param, "id")


def test_what_is_written_is_done_and_what_failed_may_be_run_again(parts: Parts) -> None:
    parts.append(block((1, "one"), (2, None)))
    parts.append(block((3, "three")))
    assert among(digests([1, 2, 3, 4]), parts.done(retry_errors=False)).tolist() == [True, True, True, False]
    assert among(digests([1, 2, 3, 4]), parts.done(retry_errors=True)).tolist() == [True, False, True, False]


def test_the_newer_of_two_rows_of_one_name_holds(parts: Parts) -> None:
    parts.append(block((1, "one"), (2, None), (3, None)))
    parts.append(block((4, None)))
    parts.append(block((2, "two"), (3, None), (4, "four")))
    assert parts.settle() == 3
    assert texts(parts) == {1: "one", 2: "two", 3: None, 4: "four"}
    assert len(parts.names()) == 2  # of the second nothing was left
    assert parts.settle() == 0


def test_settling_that_is_cut_off_after_any_write_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    for survives in range(4):
        parts = Parts(Storage.of("output", str(tmp_path / str(survives))), "parquet", "id")
        for number in range(3):
            parts.append(block((number, f"old {number}"), (number + 10, None), (99, None)))
        parts.append(block((10, "new"), (11, "new"), (12, "new"), (99, "new")))
        write, left = Storage.write, [survives]

        def dying(self: Storage, name: str, data: Any, write: Any = write, left: list[int] = left) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1
            write(self, name, data)

        with monkeypatch.context() as patch:
            patch.setattr(Storage, "write", dying)
            if survives < 3:
                with pytest.raises(Killed):
                    parts.settle()
            else:
                parts.settle()
        parts.settle()
        assert texts(parts) == {0: "old 0", 1: "old 1", 2: "old 2", **dict.fromkeys((10, 11, 12, 99), "new")}


def test_a_part_that_was_cut_off_is_no_part(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.append(block((1, "one")))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(KeyboardInterrupt):
            parts.append(block((2, "two")))
    assert texts(parts) == {1: "one"}
    assert len(list((tmp_path / "out").iterdir())) == 2
    parts.place.remove_partials()
    assert [file.name for file in (tmp_path / "out").iterdir()] == parts.names()


def test_parts_can_lie_in_any_file_system_of_pyarrow(tmp_path: Path) -> None:
    subtree = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    parts = Parts(Storage(subtree, "deep/out", "test://deep/out"), "parquet", "id")
    parts.append(block((1, "one"), (2, None)))
    parts.append(block((2, "two")))
    parts.settle()
    assert texts(parts) == {1: "one", 2: "two"}
    assert sorted(file.name for file in (tmp_path / "deep" / "out").iterdir()) == parts.names()


def test_mixed_columns_are_written_as_what_they_mean(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3], "label": [json.dumps("word"), "7", None]})
    table = append_outputs(table, [[RowAnswer("t", "stop", 1, 1, 1)]] * 3)
    for kind, wanted in (("parquet", ["word", "7", None]), ("jsonl", ["word", 7, None])):
        parts = Parts(Storage.of("output", str(tmp_path / kind)), kind, "id", frozenset({"label"}))  # type: ignore[arg-type]
        parts.append(table)
        assert [row["label"] for row in parts.all_rows()] == wanted


def test_parquet_parts_keep_the_types_of_columns(tmp_path: Path) -> None:
    parts = Parts(Storage.of("output", str(tmp_path)), "parquet", "id")
    name = parts.append(block(("a", None)))
    assert str(pq.read_schema(tmp_path / name).field("num_input_tokens").type) == "int64"


def test_digests_tell_names_apart_and_find_repeats() -> None:
    names = digests(["a", "b", "a", 1, "1", "b"])
    assert repeats(names).tolist() == [2, 4, 5]
    assert not among(names, digests([])).any()
    many = digests(range(10_000))
    assert len(np.unique(many)) == 10_000


def test_parts_are_written_by_rows_or_by_time_and_less_often_as_a_job_goes_on(tmp_path: Path) -> None:
    now = [0.0]
    parts = Parts(Storage.of("output", str(tmp_path)), "parquet", "id")
    writer = PartWriter(parts, clock=lambda: now[0])
    writer.add(block((0, "t")))
    assert parts.names() == []
    now[0] = PART_SECONDS
    writer.add(block((1, "t")))
    assert len(parts.names()) == 1
    now[0] = 1000.0
    writer.add(block((2, "t")))
    assert len(parts.names()) == 2  # the last was long ago, so there is nothing to wait for
    now[0] = 1000.0 + 2 * PART_SECONDS
    writer.add(block((3, "t")))
    assert len(parts.names()) == 2
    writer.add(block(*((number, "t") for number in range(4, 2000))))
    assert len(parts.names()) == 3
    writer.add(block((2000, "t")))
    writer.close()
    writer.add(block((2001, "t")))
    writer.flush()
    assert len(texts(parts)) == 2001


def test_a_failed_row_ends_a_job_that_says_so_and_is_not_written() -> None:
    kept, end = ErrorLimits("fail", None, ["id"]).passed(block(("a", "x"), ("b", None), ("c", "y")))
    assert kept["id"].to_pylist() == ["a", "c"]
    assert end is not None
    assert "row id='b' failed: Kind: why" in str(end)


def test_too_many_failed_rows_end_a_job() -> None:
    good = block(*((number, "x") for number in range(95)))
    bad = block(*((number, None) for number in range(10)))
    limits = ErrorLimits("continue", 0.1, ["id"])
    assert limits.passed(good)[1] is None
    assert limits.passed(bad)[1] is None  # 10 of 105
    kept, end = limits.passed(bad)
    assert len(kept) == 10
    assert "20 of 115 rows failed, more than max_error_rate=0.1" in str(end)
    few = ErrorLimits("continue", 0.0, ["id"])
    assert few.passed(bad)[1] is None
    assert "10 of 10 rows failed" in str(few.verdict())
