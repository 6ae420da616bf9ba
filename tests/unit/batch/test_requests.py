"""Templates, a row's own sampling, samples and OpenAI bodies: every row becomes requests, or an error of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from cast_ray.batch.columns import append_outputs
from cast_ray.batch.extras import ExtraColumns, judged
from cast_ray.batch.pipeline import sort_by_prompt
from cast_ray.batch.requests import RequestMaker, RequestSettings
from cast_ray.batch.stage import Once
from cast_ray.config import BatchConfig
from cast_ray.errors import ConfigError, EngineError, InputError
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import SamplingParams, derive_seed
from tests.support import qwen3, save_tiny_model

ROW = {"text": "fine tea", "lang": "German", "empty": None, "meta": {"stars": 4}}


def make(row: dict[str, Any], json_columns: tuple[str, ...] = (), **settings: Any) -> list[RowRequest] | RowAnswer:
    config = BatchConfig(**settings)
    made = RequestSettings(config, tuple(row), None, frozenset(json_columns), samples=config.n > 1)
    return RequestMaker(made).of_row(row, "r1")


def one(row: dict[str, Any], json_columns: tuple[str, ...] = (), **settings: Any) -> RowRequest:
    (request,) = made if isinstance(made := make(row, json_columns, **settings), list) else [made]
    assert isinstance(request, RowRequest), request
    return request


def error(row: dict[str, Any], **settings: Any) -> str:
    made = make(row, **settings)
    assert isinstance(made, RowAnswer)
    assert made.error is not None
    return made.error


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        ({"template": "Label: {{ text }}"}, [("user", "Label: fine tea")]),
        ({"template": "Label: {{ text }}", "chat": False}, "Label: fine tea"),
        ({"template": "{{ text }}", "system": "In {{ lang }}."}, [("system", "In German."), ("user", "fine tea")]),
        ({"system": "Be brief."}, [("system", "Be brief."), ("user", "fine tea")]),
        ({"chat": True}, [("user", "fine tea")]),
        ({}, "fine tea"),
        ({"template": "{% if empty %}{{ empty }}{% endif %}{{ meta.stars }} stars"}, [("user", "4 stars")]),
        ({"template": "{{ text | upper }}\n"}, [("user", "FINE TEA\n")]),
    ],
)
def test_prompts_are_made_of_columns(settings: dict[str, Any], prompt: Any) -> None:
    if isinstance(prompt, list):
        prompt = [{"role": role, "content": content} for role, content in prompt]
    assert one(ROW, **settings).prompt == prompt


def test_arguments_of_the_chat_template_reach_it(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path, qwen3())
    (target / "chat_template.jinja").write_text("{{ messages[0].content }} {{ extra | default('') }}")
    row = {"messages": [{"role": "user", "content": "t3 t4"}]}
    plain = one(row, engine={"target": str(target)})
    told = one(row, engine={"target": str(target)}, chat_template_kwargs={"extra": "t5"})
    assert plain.prompt == row["messages"]  # left to the engine
    assert isinstance(told.prompt, list)
    assert AutoTokenizer.from_pretrained(target).decode(told.prompt) == "t3 t4 t5"
    broken = error(row, engine={"target": str(target)}, chat_template_kwargs={"extra": 5, "messages": 1})
    assert "the chat template refuses them" in broken


def test_a_system_message_does_not_replace_one_that_a_chat_has() -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hello"}]
    assert one({"messages": own}, system="job").prompt == own
    assert one({"messages": own[1:]}, system="job").prompt == [{"role": "system", "content": "job"}, own[1]]


def test_values_of_mixed_columns_reach_a_template_as_they_are() -> None:
    row = {"label": json.dumps("word"), "tags": json.dumps(["a", "b"])}
    request = one(row, ("label", "tags"), template="{{ label }} {{ tags | join('+') }}", chat=False)
    assert request.prompt == "word a+b"


def test_a_template_that_asks_for_no_column_names_those_there_are() -> None:
    with pytest.raises(InputError, match=r"template='{{ txt }}': asks for txt, no column.*there: text, lang, empty"):
        make(ROW, template="{{ txt }}")
    with pytest.raises(InputError, match=r"system=.*asks for who"):
        make(ROW, system="{{ who }}")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ empty }}", "prints empty, which is null in this row"),
        ("{{ meta.moons }}", "cannot be filled from this row .*no attribute 'moons'"),
        ("{{ text / 2 }}", "cannot be filled from this row .TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% if false %}{{ text }}{% endif %}", "gives an empty prompt"),
    ],
)
def test_a_row_that_a_template_cannot_take_is_that_rows_error(template: str, problem: str) -> None:
    import re

    assert re.search(problem, error(ROW, template=template))


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no Jinja template"):
        make(ROW, template="{{ text ")
    for settings, words in (
        ({"template": "{{ text }}", "prompt_column": "text"}, "cannot be given together"),
        ({"system": "Hi", "chat": False}, "needs a chat"),
    ):
        with pytest.raises(ConfigError, match=words):
            BatchConfig(**settings)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 7, "top_p": 0.5, "stop": ["END"]},
        {"max_tokens": 7.0, "top_p": 0.5, "stop": ["END"], "regex": None},
        json.dumps({"max_completion_tokens": 7, "top_p": 0.5, "stop": "END"}),
    ],
)
def test_a_rows_own_sampling_wins_over_the_jobs(sampling: Any) -> None:
    request = one({"prompt": "hi", "sampling": sampling}, temperature=0.5, max_tokens=20, sampling={"top_k": 3})
    params = request.params
    assert (params.max_tokens, params.top_p, params.stop, params.top_k) == (7, 0.5, ("END",), 3)
    assert params.temperature == 0.5


def test_columns_named_like_parameters_are_read_when_asked_for() -> None:
    row = {"prompt": "hi", "temperature": "0.25", "stop": "3", "max_tokens": 9.0, "seed": None}
    assert one(row).params.temperature == 0.0
    params = one(row, sampling_columns=["temperature", "stop", "max_tokens", "seed"], seed=5).params
    assert (params.temperature, params.stop, params.max_tokens) == (0.25, ("3",), 9)
    assert params.seed == derive_seed(5, "r1")
    with pytest.raises(
        InputError, match=r"sampling_columns='top_k': is no column of the input\. Columns there: prompt"
    ):
        make(row, sampling_columns=["top_k"])


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
        ({"heat": 1}, "heat=1: is not a sampling parameter"),
        ("[1]", "is no object of sampling parameters"),
        ("{oops", "is no object of sampling parameters"),
        ({"n": 3, "temperature": 1.0}, "n=3: is more than the 1 that the output has room for"),
        ({"json_schema": "not json"}, "json_schema='not json': is no JSON"),
    ],
)
def test_a_bad_override_is_that_rows_error(sampling: Any, problem: str) -> None:
    found = error({"prompt": "hi", "sampling": sampling})
    assert found.startswith("InvalidSampling: ")
    assert problem in found


def test_a_row_that_names_its_own_form_does_not_keep_the_jobs() -> None:
    params = one({"prompt": "hi", "sampling": {"regex": "[0-9]"}}, choices=["a", "b"], choice_probabilities=True).params
    assert (params.regex, params.choice, params.choice_probabilities) == ("[0-9]", (), False)


def test_samples_of_a_row_have_seeds_of_their_own_and_the_first_is_that_of_one() -> None:
    alone = one({"prompt": "hi"}, temperature=1.0)
    several = make({"prompt": "hi"}, temperature=1.0, n=3)
    assert isinstance(several, list)
    assert [request.params.n for request in several] == [1, 1, 1]
    assert several[0] == alone
    assert len({request.params.seed for request in several}) == 3
    answers = [[RowAnswer("a", "stop", 5, 1, 1), RowAnswer("b", "length", 5, 2, 1)]]
    table = append_outputs(pa.table({"id": [1]}), answers, samples=True)
    row = table.to_pylist()[0]
    assert (row["generated_text"], row["finish_reason"], row["num_input_tokens"]) == (["a", "b"], ["stop", "length"], 5)
    broken = append_outputs(pa.table({"id": [1]}), [[answers[0][0], RowAnswer.failed("K", "w")]], samples=True)
    assert broken.to_pylist()[0]["generated_text"] is None
    assert broken.to_pylist()[0]["error"] == "K: w"


def test_settings_that_every_row_would_be_refused_for_are_refused_once() -> None:
    for settings, words in (
        ({"sampling": {"heat": 1}}, "heat=1: is not a sampling parameter"),
        ({"sampling": {"temperature": 1}}, "have settings of their own"),
        ({"choices": ["a"], "regex": "b"}, "contradicts"),
        ({"n": 2}, "temperature is 0"),
        ({"choice_probabilities": True}, "has no labels. Give them with choices"),
        ({"json_schema": "absent.json"}, "cannot be read"),
        ({"json_schema": "{oops"}, "is not JSON"),
    ):
        with pytest.raises(ConfigError, match=words):
            BatchConfig(**settings)


def test_equal_requests_are_generated_once() -> None:
    asked: list[RowRequest] = []

    async def generate(rows: Sequence[RowRequest]) -> list[RowAnswer]:
        asked.extend(rows)
        await asyncio.sleep(0)
        if any(row.prompt == "dead" for row in rows):
            raise EngineError("no engine is left")
        return [RowAnswer(str(row.prompt)) for row in rows]

    def rows(*prompts: str) -> list[RowRequest]:
        return [RowRequest(str(number), prompt, SamplingParams()) for number, prompt in enumerate(prompts)]

    async def run() -> None:
        once = Once(generate, keep=3)
        first, second = await asyncio.gather(once(rows("a", "b", "a")), once(rows("b", "c")))
        assert [answer.text for answer in first + second] == ["a", "b", "a", "b", "c"]
        assert [row.prompt for row in asked] == ["a", "b", "c"]
        await once(rows("a", "d"))
        assert [row.prompt for row in asked] == ["a", "b", "c", "d"]
        with pytest.raises(EngineError):
            await once(rows("dead"))
        await once(rows("a"))  # forgotten, for only three are kept
        assert [row.prompt for row in asked][-1] == "a"

    asyncio.run(run())


def test_equal_prompts_share_their_sample_where_they_are_answered_once() -> None:
    maker = RequestMaker(RequestSettings(BatchConfig(temperature=1.0, dedupe=True), ("prompt",), "id"))
    first, second = maker.of_row({"prompt": "a"}, 1), maker.of_row({"prompt": "a"}, 2)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[0].params == second[0].params


def test_rows_whose_prompts_begin_alike_are_put_together() -> None:
    table = pa.table({"prompt": ["b 1", None, "a 1", "b 2", "a 2"]})
    settings = RequestSettings(BatchConfig(), ("prompt",), None)
    assert sort_by_prompt(table, settings)["prompt"].to_pylist() == [None, "a 1", "a 2", "b 1", "b 2"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "score": {"type": "number"},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {}},
    },
}


def test_answers_of_a_schema_are_typed_columns_too() -> None:
    extras = ExtraColumns(BatchConfig(json_schema=SCHEMA), samples=False)
    text = json.dumps({"name": "Ada", "age": 36, "score": 1, "mood": "good", "tags": ["x"], "place": {"a": 1}})
    asked = SamplingParams(json_schema=json.dumps(SCHEMA))
    cut = judged(RowAnswer('{"name": "A', "length", 5, 9, 4), asked)
    assert cut.error is not None
    assert "no whole JSON after 9 tokens (finish_reason length). Raise max_tokens" in cut.error
    assert judged(RowAnswer(text), asked) == RowAnswer(text)
    huge = RowAnswer('{"age": 1' + "0" * 30 + "}")
    table = extras.append(pa.table({"id": [1, 2, 3]}), [[RowAnswer(text)], [cut], [huge]])
    assert table.column_names == ["id", *extras.names]
    assert [str(kind) for kind in table.schema.types[1:]] == [
        "string", "int64", "double", "string", "list<item: string>", "large_string",
    ]  # fmt: skip
    assert list(table.to_pylist()[0].values())[1:] == ["Ada", 36, 1.0, "good", ["x"], '{"a": 1}']
    assert list(table.to_pylist()[1].values())[1:] == list(table.to_pylist()[2].values())[1:] == [None] * 6


def test_an_answer_that_is_no_label_is_an_error() -> None:
    asked = SamplingParams(choice=("yes", "no"))
    assert judged(RowAnswer("no"), asked).error is None
    assert "none of the choices" in str(judged(RowAnswer("nope"), asked).error)


def test_label_and_log_probabilities_are_columns_where_they_are_asked_for() -> None:
    answer = RowAnswer("yes", choice_probabilities={"yes": 0.75, "no": 0.25}, token_ids=(4, 5), logprobs=(-0.5, -1.0))
    failed = RowAnswer.failed("K", "w")
    labels = ExtraColumns(BatchConfig(choices=["yes", "no"], choice_probabilities=True), samples=False)
    table = labels.append(pa.table({"id": [1, 2]}), [[answer], [failed]])
    assert table["probability_yes"].to_pylist() == [0.75, None]
    assert table["probability_no"].to_pylist() == [0.25, None]
    asked = ExtraColumns(BatchConfig(sampling={"logprobs": 0}), samples=False)
    row = asked.append(pa.table({"id": [1]}), [[answer]]).to_pylist()[0]
    assert (row["generated_token_ids"], row["logprobs"]) == ([4, 5], [-0.5, -1.0])
