"""Every cell becomes a prompt or an error that says what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from cast_ray.batch.columns import READ_ERROR_COLUMN, append_outputs, check_columns
from cast_ray.batch.prepare import PromptColumn, find_prompt_column, read_prompt
from cast_ray.batch.requests import RequestMaker, RequestSettings
from cast_ray.config import BatchConfig
from cast_ray.errors import ConfigError, InputError, RequestError
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import derive_seed


def make(table: pa.Table, id_column: str | None = "id", **settings: Any) -> tuple[pa.Table, list[Any]]:
    """What the stage makes of a table: of each row its only request, or its error."""
    columns = [name for name in table.column_names if name != READ_ERROR_COLUMN]
    maker = RequestMaker(RequestSettings(BatchConfig(**settings), tuple(columns), id_column))
    clean, made = maker.make(table)
    return clean, [requests[0] if isinstance(requests, list) else requests for requests in made]


TEXT = PromptColumn("prompt", "text")
CHAT = PromptColumn("messages", "messages")


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        (["text", "prompt", "messages"], CHAT),
        (["text", "prompt"], TEXT),
        (["id", "text"], PromptColumn("text", "text")),
    ],
)
def test_the_prompt_column_is_found_by_its_name(columns: list[str], found: PromptColumn) -> None:
    assert find_prompt_column(columns) == found


def test_a_named_column_wins_over_the_usual_ones() -> None:
    assert find_prompt_column(["messages", "ask"], prompt_column="ask") == PromptColumn("ask", "text")
    assert find_prompt_column(["prompt", "turns"], messages_column="turns") == PromptColumn("turns", "messages")


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(InputError, match=r"prompt_column='ask': is no column of the input\. Columns there: id, body"):
        find_prompt_column(["id", "body"], prompt_column="ask")
    with pytest.raises(InputError, match="none of them is messages, prompt or text"):
        find_prompt_column(["id", "body"])
    with pytest.raises(ConfigError, match="cannot be given together"):
        find_prompt_column(["a", "b"], "a", "b")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "is null"),
        ("", "is empty"),
        (" \n", "is empty"),
        (7, "is a number, not text"),
        ([], "is a list, not text"),
    ],
)
def test_a_bad_text_prompt_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_prompt(value, TEXT)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "is null"),
        ("hello", "is text, not a list of messages"),
        ([], "is empty"),
        (["hello"], r"messages\[0\]='hello': is text, not a message"),
        ([{"role": "user"}], "has no content"),
        ([{"role": None, "content": "a"}], "has no role"),
        ([{"role": 3, "content": "a"}], "is no role"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 5}], r"messages\[1\].content=5: is a number"),
    ],
)
def test_bad_messages_are_refused(value: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_prompt(value, CHAT)


def test_keys_that_arrow_filled_with_nulls_are_left_out_of_messages() -> None:
    message = {"role": "user", "content": "hello"}
    assert read_prompt([{**message, "name": None}], CHAT) == [message]


def test_a_column_of_mixed_types_is_decoded_before_it_is_judged() -> None:
    mixed = PromptColumn("prompt", "text", as_json=True)
    assert read_prompt(json.dumps("hello"), mixed) == "hello"
    with pytest.raises(RequestError, match="is a number, not text"):
        read_prompt("5", mixed)


def test_a_row_that_could_not_be_read_keeps_its_own_reason() -> None:
    table = pa.table({"prompt": ["hello", None], "id": ["a", None], READ_ERROR_COLUMN: [None, "UnreadableRow: bad"]})
    clean, (good, bad) = make(table)
    assert clean.column_names == ["prompt", "id"]
    assert isinstance(good, RowRequest)
    assert bad == RowAnswer.failed("UnreadableRow", "bad")


def test_cells_that_are_not_utf8_cost_their_own_rows_only() -> None:
    broken = pa.array([b"x", b"\xff", None, b"y"]).view(pa.string())
    ids = pa.array([b"a", b"b", b"c", b"\xfe"]).view(pa.string())
    chats = [[{"role": "user", "content": text}] for text in broken.view(pa.binary()).to_pylist()]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.binary())]))
    flat = pa.array(chats, kind).flatten()
    contents = flat.field("content").view(pa.string())
    messages = pa.ListArray.from_arrays(
        pa.array(range(5), pa.int32()), pa.StructArray.from_arrays([flat.field("role"), contents], ["role", "content"])
    )
    for column, cells in ((TEXT, broken), (CHAT, messages)):
        table = pa.table({column.name: cells, "id": ids})
        answers = make(table)[1]
        assert isinstance(answers[0], RowRequest)
        errors = [answer.error for answer in answers[1:] if isinstance(answer, RowAnswer)]
        assert len(errors) == 3
        assert errors[0].startswith(f"UnreadableRow: column {column.name} cannot be read ('utf-8' codec")
        assert errors[1].startswith("InvalidPrompt")
        assert errors[2].startswith("UnreadableRow: column id cannot be read")


def test_only_sampled_rows_get_seeds_and_each_its_own() -> None:
    table = pa.table({"prompt": ["same", "same"], "id": [1, 2]})
    greedy = make(table, seed=3)[1]
    sampled = make(table, temperature=0.7, seed=3)[1]
    assert [row.params.seed for row in greedy if isinstance(row, RowRequest)] == [None, None]
    assert [row.params.seed for row in sampled if isinstance(row, RowRequest)] == [
        derive_seed(3, "1"),
        derive_seed(3, "2"),
    ]


def test_outputs_have_their_types_where_every_row_failed() -> None:
    table = append_outputs(pa.table({"id": [1]}), [[RowAnswer.failed("Kind", "why\n not")]])
    assert table.schema.field("generated_text").type == pa.string()
    assert table.schema.field("num_input_tokens").type == pa.int64()
    assert table["error"].to_pylist() == ["Kind: why not"]


def test_an_input_column_that_would_be_lost_is_refused() -> None:
    check_columns(["id", "prompt"])
    with pytest.raises(InputError, match=r"\['error', 'rounds'\]: are also written by the job\. Rename"):
        check_columns(["rounds", "id", "error"])
