"""Inputs are found, looked through, and read piece by piece; bad rows stay rows, and a hopeless input is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from cast_ray.batch import text_formats
from cast_ray.batch.columns import READ_ERROR_COLUMN
from cast_ray.batch.find import find_files
from cast_ray.batch.formats import InputPlan, plan_input
from cast_ray.batch.names import digests
from cast_ray.batch.source import Reading, read_tables
from cast_ray.batch.storage import Storage
from cast_ray.errors import InputError


def read(plan: InputPlan) -> list[dict[str, Any]]:
    """All rows of a plan, every table checked against the schema that was promised."""
    rows: list[dict[str, Any]] = []
    reading = Reading.of(plan)
    for piece in plan.pieces:
        tables = list(read_tables(reading, piece))
        assert all(table.schema.equals(reading.output_schema) for table in tables)
        assert sum(len(table) for table in tables) == piece.rows
        rows += [row for table in tables for row in table.to_pylist()]
    assert len(rows) == plan.rows
    return rows


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def names(path: Path) -> list[str]:
    return [file.name for file in find_files(Storage.of("input", str(path)))]


def test_a_folder_is_searched_for_readable_files_in_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a.jsonl", "_meta.jsonl", ".hidden/x.jsonl", "notes.md"):
        write(tmp_path / name, {"prompt": name})
    assert names(tmp_path) == ["a.jsonl", "b/2.jsonl"]
    assert names(tmp_path / "**" / "*.jsonl") == ["_meta.jsonl", "a.jsonl", "b/2.jsonl"]


@pytest.mark.parametrize(
    ("files", "path", "problem"),
    [
        ((), "none.jsonl", "does not exist"),
        ((), "*.jsonl", "matches no file"),
        (("a.doc",), "a.doc", r"has the unknown extension '\.doc'"),
        (("a.parquet.gz",), "a.parquet.gz", r"has the unknown extension '\.gz'"),
        (("README",), "README", "has no extension"),
        (("a.doc",), "", r"holds no readable file\. Readable are \.parquet, \.arrow, \.jsonl, \.csv and \.txt"),
        (("a.csv", "a.jsonl"), "", "holds csv and jsonl files"),
        (("a.parquet",), "a.parquet", "is not a readable Parquet file"),
    ],
)
def test_an_input_that_cannot_be_used_is_named(tmp_path: Path, files: tuple[str, ...], path: str, problem: str) -> None:
    for name in files:
        write(tmp_path / name, {"prompt": "text"})
    with pytest.raises(InputError, match=problem):
        plan_input(tmp_path / path)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_an_input_without_rows_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="has no rows"):
        plan_input(tmp_path / name)


def test_an_empty_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="has no rows"):
        plan_input(tmp_path / "in.parquet")


def test_an_input_of_bad_lines_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no readable row \(2 bad ones\)"):
        plan_input(write(tmp_path / "in.jsonl", b"oops", b"[1]"))


def test_bad_lines_become_rows_with_a_reason_and_nothing_else(tmp_path: Path) -> None:
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    path = write(
        tmp_path / "in.jsonl",
        b"\xef\xbb\xbf" + b'{"id": "a", "prompt": "first"}',
        b"{oops",
        b"",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"7",
        deep,
        {"id": "b", "prompt": "last \U0001f600"},
    )
    plan = plan_input(path)
    rows = read(plan)
    assert [row["prompt"] for row in rows] == ["first", None, None, None, None, None, "last \U0001f600"]
    problems = [row[READ_ERROR_COLUMN] for row in rows]
    assert problems[0] is problems[6] is None
    for problem, words in zip(
        problems[1:6],
        [
            "line 2 is not JSON",
            "line 4 is not UTF-8",
            "line 5 has half of a surrogate pair",
            "line 6 is JSON but no obj",
        ],
        strict=False,
    ):
        assert words in problem
    assert "line 7 cannot be read" in problems[5]
    assert plan.make_row_id
    assert [row["row_id"] for row in rows] == [f"in.jsonl:{line:09d}" for line in (1, 2, 4, 5, 6, 7, 8)]


def test_types_that_differ_from_row_to_row_are_kept_as_json_text(tmp_path: Path) -> None:
    values: list[Any] = ["text", 5, None, [1], {"a": True}]
    plan = plan_input(write(tmp_path / "in.jsonl", *({"id": i, "label": value} for i, value in enumerate(values))))
    assert plan.json_columns == {"label"}
    labels = [row["label"] for row in read(plan)]
    assert labels[2] is None
    assert [json.loads(label) for label in labels if label is not None] == ["text", 5, [1], {"a": True}]


def test_columns_have_one_type_however_late_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_formats, "PIECE_ROWS", 2)
    rows = [
        {"id": 0, "number": 2**60 + 1, "late": None, "chat": [{"role": "user"}], "never": None, "void": {}},
        {"id": 1, "number": 2, "chat": []},
        {"id": 2, "number": 0.5, "late": "x", "chat": [{"role": "user", "name": "n"}]},
        {"id": 3, "extra": True, "wide": 10**30},
    ]
    plan = plan_input(write(tmp_path / "in.jsonl", *rows))
    assert len(plan.pieces) == 2
    assert plan.schema.field("number").type == pa.float64()
    assert plan.schema.field("late").type == plan.schema.field("never").type == pa.string()
    assert plan.json_columns == {"void", "wide"}
    read_rows = read(plan)
    assert [row["number"] for row in read_rows] == [float(2**60), 2.0, 0.5, None]
    assert read_rows[0]["chat"] == [{"role": "user", "name": None}]
    assert [row["extra"] for row in read_rows] == [None, None, None, True]
    assert not plan.make_row_id


def test_files_of_unlike_columns_are_read_together(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"prompt": "a", "n": 1})
    write(tmp_path / "b.jsonl", {"prompt": "b", "n": "two"})
    plan = plan_input(tmp_path)
    assert [row["n"] for row in read(plan)] == ["1", '"two"']


def test_every_piece_reads_its_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_formats, "PIECE_ROWS", 7)
    plan = plan_input(write(tmp_path / "in.jsonl", *({"prompt": f"p{index}"} for index in range(50))))
    assert len(plan.pieces) == 8
    rows = read(plan)
    assert [row["prompt"] for row in rows] == [f"p{index}" for index in range(50)]
    assert [row["row_id"] for row in rows] == sorted(row["row_id"] for row in rows)


def test_csv_keeps_text_as_it_is_and_marks_bad_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_formats, "PIECE_ROWS", 2)
    (tmp_path / "in.csv").write_bytes(
        b"\xef\xbb\xbfid,prompt,zip\r\n"
        b'1,"two\nlines, ""quoted""",007\r\n'
        b"2,too,many,fields\r\n"
        b"\r\n"
        b"3,\xff,1\r\n"
        b"4,few\r\n"
        b"5,,\n"
    )
    plan = plan_input(tmp_path / "in.csv")
    rows = read(plan)
    assert rows[0]["prompt"] == 'two\nlines, "quoted"'
    assert rows[0]["zip"] == "007"
    assert [row["id"] for row in rows] == ["1", None, None, None, "5"]
    assert [row[READ_ERROR_COLUMN] for row in rows] == [
        None,
        "UnreadableRow: record 2 has 4 fields where the header has 3. Mend or remove it",
        "UnreadableRow: record 3 is not UTF-8. Mend or remove it",
        "UnreadableRow: record 4 has 2 fields where the header has 3. Mend or remove it",
        None,
    ]
    assert [row["row_id"] for row in rows] == [f"in.csv:{number:09d}" for number in range(1, 6)]


def test_an_empty_field_in_quotes_is_a_row_and_a_blank_line_is_none(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('prompt\nfirst\n""\n\n  \n"\n"\nlast\n')
    rows = read(plan_input(tmp_path / "in.csv"))
    assert [row["prompt"] for row in rows] == ["first", "", "\n", "last"]
    assert {row[READ_ERROR_COLUMN] for row in rows} == {None}


def test_csv_with_one_column_name_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(InputError, match=r"has the columns \['a'\] twice"):
        plan_input(tmp_path / "in.csv")


def test_parquet_is_read_by_row_groups_with_row_numbers(tmp_path: Path) -> None:
    table = pa.table({"prompt": [f"p{index}" for index in range(25)]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)
    plan = plan_input(tmp_path / "in.parquet")
    rows = read(plan)
    assert [row["prompt"] for row in rows] == table["prompt"].to_pylist()
    assert [row["row_id"] for row in rows] == [f"in.parquet:{number:09d}" for number in range(1, 26)]


def test_parquet_files_of_one_family_are_joined(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int32()), "prompt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "id": pa.array([2], pa.int64()), "new": [1.5]}), tmp_path / "b.parquet")
    plan = plan_input(tmp_path)
    shared = {READ_ERROR_COLUMN: None}
    assert read(plan) == [
        {"id": 1, "prompt": "a", "new": None, **shared},
        {"id": 2, "prompt": "b", "new": 1.5, **shared},
    ]


def test_columns_that_differ_from_file_to_file_are_kept_as_json_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": pa.array([1], pa.int32()), "prompt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"label": ["one"], "prompt": ["b"]}), tmp_path / "b.parquet")
    plan = plan_input(tmp_path)
    assert plan.json_columns == {"label"}
    assert [row["label"] for row in read(plan)] == ["1", '"one"']


@pytest.mark.parametrize(
    ("ids", "made"), [(["a", "b"], False), ([1, 2], False), (["a", "a"], True), (["a", None], True), ([[1], [2]], True)]
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_row_ids_are_made_unless_the_ids_name_every_row(tmp_path: Path, kind: str, ids: list[Any], made: bool) -> None:
    path = tmp_path / f"in.{kind}"
    if kind == "jsonl":
        write(path, *({"id": value, "prompt": "p"} for value in ids))
    else:
        pq.write_table(pa.table({"id": ids, "prompt": ["p", "p"]}), path)
    plan = plan_input(path)
    assert plan.make_row_id is made
    assert plan.id_column == ("row_id" if made else "id")
    assert [row["id"] for row in read(plan)] == ids


def test_the_column_that_names_every_row_is_the_one_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_formats, "PIECE_ROWS", 2)
    repeated = [{"row_id": 1, "id": name, "prompt": "p"} for name in ("a", "b")]
    assert plan_input(write(tmp_path / "repeated.jsonl", *repeated)).id_column == "id"
    # Two whole numbers that are one number once a fraction makes the column a float one.
    merged = [{"id": value, "prompt": "p"} for value in (2**60 + 1, 2**60 + 2, 0.5)]
    assert plan_input(write(tmp_path / "merged.jsonl", *merged)).make_row_id


def test_ids_that_are_not_utf8_name_no_rows(tmp_path: Path) -> None:
    ids = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"id": ids, "prompt": ["p", "q"]}), tmp_path / "in.parquet")
    assert plan_input(tmp_path / "in.parquet").make_row_id


def test_row_ids_of_the_input_that_repeat_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"row_id": 1, "prompt": "a"}, {"row_id": 1, "prompt": "b"})
    with pytest.raises(InputError, match="column='row_id': is null or the same in several rows"):
        plan_input(path)


def test_ids_that_mostly_name_rows_make_errors_of_those_that_repeat(tmp_path: Path) -> None:
    rows: list[Any] = [{"id": f"r{index}", "prompt": "p"} for index in range(40)]
    rows[7]["id"] = rows[30]["id"] = "r3"
    rows[9]["id"] = None
    plan = plan_input(write(tmp_path / "in.jsonl", *rows, b"[1]"))
    found = read(plan)
    assert plan.make_row_id
    assert plan.user_column == "id"
    errors = {place: row[READ_ERROR_COLUMN] for place, row in enumerate(found) if row[READ_ERROR_COLUMN]}
    assert set(errors) == {7, 30, 40}
    assert errors[7] == errors[30] == "DuplicateId: id='r3' names an earlier row too. Make it unique"


def test_a_column_asked_for_as_the_id_makes_errors_of_all_repeats(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *({"key": key, "prompt": "p"} for key in "aabb"))
    errors = [row[READ_ERROR_COLUMN] is not None for row in read(plan_input(path, "key"))]
    assert errors == [False, True, False, True]
    with pytest.raises(InputError, match=r"id_column='nope': is no column of the input\. Columns there: key, prompt"):
        plan_input(path, "nope")


def test_ids_of_mixed_types_stay_readable(tmp_path: Path) -> None:
    plan = plan_input(write(tmp_path / "in.jsonl", {"id": "a", "prompt": "p"}, {"id": 5, "prompt": "p"}))
    assert [row["id"] for row in read(plan)] == ["a", "5"]


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_packed_files_hold_what_plain_ones_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packing: str
) -> None:
    monkeypatch.setattr(text_formats, "PIECE_ROWS", 10)
    lines = [f"row {index}" for index in range(25)]
    if kind == "jsonl":
        data = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
    else:
        data = ("text\n" * (kind == "csv") + "".join(f"{line}\n" for line in lines)).encode()
    half = data.index(b"\n", len(data) // 2) + 1
    with pa.OSFile(str(tmp_path / f"in.{kind}{'.gz' if packing == 'gzip' else '.zst'}"), "wb") as file:
        for part in (data[:half], data[half:]):  # packed files may be joined end to end
            file.write(gzip.compress(part) if packing == "gzip" else zstd(part))
    plan = plan_input(tmp_path)
    assert [row["text"] for row in read(plan)] == lines
    assert len(plan.pieces) == 1
    assert [row["text"] for row in read(plan.first(12))] == lines[:12]


def test_a_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"first\r\n\n  \nsecond\n\xff\nlast")
    rows = read(plan_input(tmp_path / "in.txt"))
    assert [row["text"] for row in rows] == ["first", "second", None, "last"]
    assert [row["row_id"] for row in rows] == [f"in.txt:{line:09d}" for line in (1, 4, 5, 6)]
    assert "line 5 is not UTF-8" in rows[2][READ_ERROR_COLUMN]


@pytest.mark.parametrize("container", ["stream", "file"])
def test_a_saved_hugging_face_dataset_is_read_without_its_caches(tmp_path: Path, container: str) -> None:
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    table = pa.table({"text": [f"t{index}" for index in range(30)]})
    open_writer = pa.ipc.new_stream if container == "stream" else pa.ipc.new_file
    for name in ("data-00000-of-00001.arrow", "cache-1234.arrow"):
        with open_writer(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    rows = read(plan_input(tmp_path / "saved"))
    assert [row["text"] for row in rows] == table["text"].to_pylist()
    assert rows[0]["row_id"] == "train/data-00000-of-00001.arrow:000000001"


def test_rows_that_are_done_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_formats, "PIECE_ROWS", 4)
    plan = plan_input(write(tmp_path / "in.jsonl", *({"id": index, "prompt": "p"} for index in range(10))))
    done = digests([0, 3, 4, 5, 6, 7, 9])
    done.sort()
    tables = [table for piece in plan.pieces for table in read_tables(Reading.of(plan), piece, done)]
    assert [row["id"] for table in tables for row in table.to_pylist()] == [1, 2, 8]


def test_any_file_system_of_pyarrow_can_be_read(tmp_path: Path) -> None:
    for part in "ab":
        write(tmp_path / "deep" / f"{part}.jsonl", {"id": part, "prompt": "p"})
    subtree = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    for path in ("deep", "deep/*.jsonl", "*/[ab].jsonl"):
        plan = plan_input(Storage(subtree, path, f"test://{path}"))
        assert [row["id"] for row in read(plan)] == ["a", "b"]
    plan = plan_input(f"file://{tmp_path}/deep/a.jsonl")
    assert [row["id"] for row in read(plan)] == ["a"]


def test_a_url_of_no_known_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"input='foo://a/b': is no URL that can be read .* Known are local paths"):
        plan_input("foo://a/b")
