"""Batch files are judged as a whole first, and stored where no name from outside can lead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cast_ray.config import ServeLimits
from cast_ray.serve.batches import Batches, answered_lines, check_lines, read_lines
from cast_ray.serve.files import Store, file_record, public
from cast_ray.serve.refusal import Refusal

ENDPOINT = "/v1/completions"


def line(name: Any = "a", **changes: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": ENDPOINT, "body": {}, **changes})


def check(folder: Path, *lines: str, most: int = 10) -> list[str]:
    path = folder / "in"
    path.write_text("\n".join(lines))
    return [error["code"] for error in check_lines(path, ENDPOINT, most)[0]]


def test_a_good_file_is_read_line_by_line(tmp_path: Path) -> None:
    assert check(tmp_path, line("a"), "", line("b")) == []
    assert [(one.number, one.custom_id) for one in read_lines(tmp_path / "in")] == [(1, "a"), (3, "b")]


def test_what_is_wrong_is_said_with_its_line(tmp_path: Path) -> None:
    assert check(tmp_path, "{", line("a"), line("a"), line("b", url="/v1/files"), line(7), line("c", body=1)) == [
        "invalid_json_line",
        "duplicate_custom_id",
        "invalid_url",
        "missing_required_parameter",
        "invalid_request",
    ]
    assert check(tmp_path) == ["empty_file"]
    assert check(tmp_path, *(line(str(number)) for number in range(11))) == ["too_many_requests"]
    assert check(tmp_path, "[" * 100_000) == ["invalid_json_line"]


def test_half_a_line_of_an_interrupted_batch_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n{"custom')
    assert answered_lines(path) == {"a", "b"}
    assert path.read_text().endswith('"b"}\n')
    assert answered_lines(tmp_path / "absent") == set()


def test_records_are_seen_by_their_owner_only(tmp_path: Path) -> None:
    store = Store(tmp_path, "file")
    name = store.new_id()
    record = store.save(file_record(name, "me", "../x/../../y.jsonl", 3, "batch"))
    assert record["filename"] == "y.jsonl"
    assert store.get(name, "me")["bytes"] == 3
    assert "owner" not in public(store.get(name, "me"))
    for other, owner in ((name, "you"), (name, None), ("../keys", "me"), (f"{name}/x", "me"), (name[:-1] + "\n", "me")):
        with pytest.raises(Refusal) as found:
            store.get(other, owner)
        assert found.value.status == 404
    assert store.page("you", None, 10)["data"] == []
    assert [one["id"] for one in store.page("me", None, 10)["data"]] == [name]
    store.delete(name)
    assert list(tmp_path.iterdir()) == []


def test_lists_come_in_pages(tmp_path: Path) -> None:
    store = Store(tmp_path, "batch")
    names = [store.save({"id": store.new_id(), "created_at": number, "owner": None})["id"] for number in range(5)]
    first = store.page(None, None, 3)
    assert [one["id"] for one in first["data"]] == names[:1:-1]
    assert first["has_more"]
    rest = store.page(None, first["last_id"], 3)
    assert [one["id"] for one in rest["data"]] == names[1::-1]
    assert not rest["has_more"]


def test_files_count_towards_their_owners_room_only(tmp_path: Path) -> None:
    store = Store(tmp_path, "file")
    for owner, size in (("me", 30), ("me", 12), ("you", 5)):
        store.save(file_record(store.new_id(), owner, "x", size, "batch"))
    assert store.usage("me") == (42, 2)
    assert store.usage("you") == (5, 1)
    assert store.usage(None) == (0, 0)


def test_a_key_has_so_many_open_batches_and_the_oldest_that_ended_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Batches(tmp_path, ServeLimits(batches=2), "tiny", concurrency=1)
    name = batches.files.new_id()
    batches.files.save(file_record(name, "me", "x", 1, "batch"))
    made = [batches.create("me", name, ENDPOINT, "24h", None) for _ in range(2)]
    with pytest.raises(Refusal, match="2 batches") as refused:
        batches.make_room("me")
    assert (refused.value.status, refused.value.retry_after) == (429, 60)
    batches.make_room("you")
    for number, record in enumerate(made):
        batches.records.save({**record, "status": "completed", "created_at": number})
    monkeypatch.setattr("cast_ray.serve.batches.REMEMBERED", 2)
    batches.make_room("me")
    assert [one["id"] for one in batches.records.all()] == [made[1]["id"]]
