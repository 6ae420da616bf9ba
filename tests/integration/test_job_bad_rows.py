"""Rows that cannot be answered, in a job on a real local Ray cluster: each is named, the others are answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.errors import EngineError
from tests.fake_engine import FakeEngine
from tests.jobs import read_output, run, write_jsonl

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_bad_rows_get_errors_and_the_others_are_answered(tmp_path: Path) -> None:
    rows: list[Any] = [{"id": f"good-{index}", "prompt": f"good {index}"} for index in range(20)]
    rows[3:3] = [
        {"id": "null", "prompt": None},
        {"id": "empty", "prompt": "  "},
        {"id": "number", "prompt": 7},
        {"id": "absent"},
        {"id": "long", "prompt": "reject this"},
        {"id": "unexpected", "prompt": "strange thing"},
        '{"id": "broken", "prompt": "cut',
        "[1, 2]",
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)

    summary, written = run(source, tmp_path / "out", batch_size=4)

    good = [row for row in written if row["error"] is None]
    assert sorted(row["id"] for row in good) == sorted(f"good-{index}" for index in range(20))
    errors = {row["id"] or row["row_id"]: row["error"] for row in written if row["error"] is not None}
    assert set(errors) == {
        "null", "empty", "number", "absent", "long", "unexpected", "in.jsonl:000000010", "in.jsonl:000000011",
    }  # fmt: skip
    assert "is null" in errors["null"]
    assert "is empty" in errors["empty"]
    assert "a number, not text" in errors["number"]
    assert "longer than the context" in errors["long"]
    assert "line 10 is not JSON" in errors["in.jsonl:000000010"]
    assert "line 11 is JSON but no object" in errors["in.jsonl:000000011"]
    assert all(row["generated_text"] is None for row in written if row["error"] is not None)
    kinds = {"InvalidPrompt": 4, "KeyError": 1, "RequestError": 1, "UnreadableRow": 2}
    assert summary["errors_by_kind"] == kinds
    assert summary["failed"] == 8
    assert len(summary["first_errors"]) == 5


def test_parquet_columns_keep_their_types_where_every_row_failed_too(tmp_path: Path) -> None:
    import datetime
    import decimal

    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "prompt": ["reject", "reject"],
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "when": pa.array([datetime.datetime(2024, 1, 2), None], pa.timestamp("us")),
            "tags": pa.array([["a"], []], pa.list_(pa.string())),
            "raw": pa.array([b"\xff", None], pa.binary()),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "nothing": pa.nulls(2),
            "meta": pa.array([{"a": 1, "b": None}, None], pa.struct([("a", pa.int8()), ("b", pa.float32())])),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")

    run(tmp_path / "in.parquet", tmp_path / "out")

    (file,) = (tmp_path / "out").glob("*.parquet")
    written = pq.read_table(file)
    assert written.select(table.column_names).sort_by("id").to_pylist() == table.to_pylist()
    assert [written.schema.field(name).type for name in table.column_names] == table.schema.types
    assert str(written.schema.field("generated_text").type) == "string"
    assert str(written.schema.field("rounds").type) == "int64"


def test_text_that_is_not_utf8_costs_its_own_row_only(tmp_path: Path) -> None:
    prompts = pa.array([b"fine" if index != 7 else b"\xff" for index in range(40)]).view(pa.string())
    labels = pa.array([b"\xfe"] * 40).view(pa.string())
    pq.write_table(pa.table({"id": range(40), "prompt": prompts, "label": labels}), tmp_path / "in.parquet")

    summary = run_job(
        JobConfig(input=str(tmp_path / "in.parquet"), output=str(tmp_path / "out"), batch_size=4),
        FakeEngine,
        Console(quiet=True),
    )

    assert summary["answered"] == 39
    (failed,) = summary["first_errors"]
    assert failed["row"] == "7"
    assert failed["error"].startswith("UnreadableRow: column prompt cannot be read ('utf-8' codec")


def bad_rows() -> list[bytes]:
    """Three rows each of ten kinds that cannot be answered; `{}` stands for their id."""
    kinds = [
        b'{"id": "{}", "prompt": null}',
        b'{"id": "{}", "prompt": " "}',
        b'{"id": "{}", "prompt": 7}',
        b'{"id": "{}", "prompt": "reject this"}',
        b'{"id": "{}", "prompt": "p", "sampling": {"temperature": "hot"}}',
        b'{"id": "{}", "prompt": "p", "sampling": {"json_schema": "no schema"}}',
        b'{"id": "{}", "prompt": "\xff"}',
        b'{"id": "good-3", "prompt": "another of that name"}',
        b'["{}", "prompt"]',
        b'{"id": "{}", "prompt": {"a": [{"b": [1, {"c": null}]}]}}',
    ]
    return [
        kind.replace(b"{}", b"bad-%d-%d" % (number, copy)) for number, kind in enumerate(kinds) for copy in range(3)
    ]


def mixed_input(path: Path) -> Path:
    good = [json.dumps({"id": f"good-{index}", "prompt": f"good {index}"}).encode() for index in range(270)]
    lines: list[bytes] = []
    for place, bad in enumerate(bad_rows()):
        lines += [*good[place * 9 : place * 9 + 9], bad]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_thirty_bad_rows_of_ten_kinds_are_named_and_270_are_answered(tmp_path: Path) -> None:
    summary, written = run(mixed_input(tmp_path / "in.jsonl"), tmp_path / "out", batch_size=8)

    assert (summary["rows"], summary["answered"], summary["failed"]) == (300, 270, 30)
    assert summary["errors_by_kind"] == {
        "DuplicateId": 3, "InvalidPrompt": 12, "InvalidSampling": 6, "RequestError": 3, "UnreadableRow": 6,
    }  # fmt: skip
    good = {row["id"]: row["generated_text"] for row in written if row["error"] is None}
    assert good == {f"good-{index}": f"GOOD {index}" for index in range(270)}
    errors = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert len({row["row_id"] for row in errors}) == 30
    assert {row["row_id"] for row in errors} == {row["row_id"] for row in written if row["error"] is not None}
    assert all(len(row["error"]) > 30 for row in errors)


def test_a_job_that_is_to_fail_at_an_error_names_the_row_and_keeps_the_others(tmp_path: Path) -> None:
    source = mixed_input(tmp_path / "in.jsonl")
    with pytest.raises(EngineError, match=r"row row_id='in\.jsonl:0000000\d\d'(, id='[a-z0-9-]+')? failed: \w+: "):
        run(source, tmp_path / "out", batch_size=8, on_error="fail")
    assert all(row["error"] is None for row in read_output(tmp_path / "out"))
    assert not (tmp_path / "out" / "summary.json").exists()

    with pytest.raises(EngineError, match=r"rows failed, more than max_error_rate=0\.05"):
        run(source, tmp_path / "out", batch_size=8, max_error_rate=0.05)
    summary, written = run(source, tmp_path / "out", batch_size=8, max_error_rate=0.2)
    assert len({row["row_id"] for row in written}) == len(written) == 300
    assert summary["failed"] == 30


class Mended(FakeEngine):
    """Takes what FakeEngine rejects."""

    async def generate(self, prompt: Any, params: Any, request_id: str | None = None) -> Any:
        return await super().generate(prompt.replace("reject", "accept"), params, request_id)


def test_failed_rows_are_run_again_when_asked_and_replaced(tmp_path: Path) -> None:
    rows = [{"id": index, "prompt": f"reject {index}" if index % 7 == 3 else f"row {index}"} for index in range(50)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out"
    first, _ = run(source, output, batch_size=4)
    assert first["failed"] == 7
    same, _ = run(source, output, batch_size=4)
    assert (same["failed"], same["rows_now"]) == (7, 0)

    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = JobConfig(input=str(source), output=str(output), batch_size=4, retry_errors=True)
    summary = run_job(config, Mended, Console(quiet=True))

    assert (summary["rows"], summary["failed"], summary["rows_now"]) == (50, 0, 7)
    written = read_output(output)
    assert sorted(row["id"] for row in written) == list(range(50))
    assert {row["id"]: row["generated_text"] for row in written}[3] == "ACCEPT 3"
    assert not (output / "errors.jsonl").exists()
