"""Labels, probabilities and typed answers through a whole job with real engines; and what its report tells of them."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.stats.report import render
from tests.byte_tokenizer import byte_level
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

pytestmark = pytest.mark.usefixtures("ray_cluster")
CHOICES = ["yes", "no", "not at all"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}, "size": {"enum": [1, 22]}},
    "required": ["name", "sure", "size"],
    "additionalProperties": False,
}
FORM = {"template": "the same words stand before every row. {{ word }}", "chat": False, "max_tokens": 96}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of an engine whose model writes bytes, with a drafter that is often right by chance."""
    folder = tmp_path_factory.mktemp("spelling")
    tokenizer = byte_level()
    shape = qwen3(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024)
    save_tiny_model(folder / "target", shape)
    tokenizer.save_pretrained(folder / "target")
    file = folder / "target" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": tokenizer.eos_token_id}))
    save_tiny_drafter(folder / "drafter", target=shape)
    return {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "dtype": "float32",
        "width": "joint",
        "max_batch_size": 4,
        "page_size": 4,
        # Fewer than the actor sends at once: a full queue must not become an error of a row.
        "max_waiting": 1,
        "profile_dir": str(folder / "profiles"),
        "probe_seconds": 1.0,
    }


def run(tmp_path: Path, engine: dict[str, Any], rows: int, **settings: Any) -> tuple[dict[str, Any], pa.Table]:
    source = tmp_path / "in.csv"
    source.write_text("id,word\n" + "".join(f"{index},word {index}\n" for index in range(rows)))
    config = JobConfig(input=str(source), output=str(tmp_path / "out"), engine=engine, **FORM, **settings)
    summary = run_job(config, console=Console(quiet=True))
    return summary, pa.concat_tables(map(pq.read_table, (tmp_path / "out").glob("part-*.parquet")))


def test_labels_come_with_their_probabilities(tmp_path: Path, engine: dict[str, Any]) -> None:
    summary, table = run(tmp_path, engine, 24, choices=CHOICES, choice_probabilities=True)
    assert (summary["answered"], summary["errors_by_kind"]) == (24, {})
    for row in table.to_pylist():
        found = {label: row[f"probability_{label}"] for label in CHOICES}
        assert row["generated_text"] in found
        assert all(0 <= value <= 1 for value in found.values())
        assert sum(found.values()) == pytest.approx(1, abs=1e-5)


def test_answers_of_a_schema_are_typed_and_the_report_tells_of_the_engine(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    summary, table = run(tmp_path, engine, 40, json_schema=SCHEMA, temperature=1.0, seed=2)

    kinds = {name: str(table.schema.field(f"answer_{name}").type) for name in ("name", "sure", "size")}
    assert kinds == {"name": "string", "sure": "bool", "size": "large_string"}
    whole = [row for row in table.to_pylist() if row["error"] is None]
    # White space is free in JSON, and this model may write too much of it.
    assert len(whole) >= 20
    assert set(summary["errors_by_kind"]) <= {"IncompleteAnswer"}
    for row in whole:
        answer = json.loads(row["generated_text"])
        columns = {"name": row["answer_name"], "sure": row["answer_sure"], "size": json.loads(row["answer_size"])}
        assert columns == answer
        assert answer["name"] in ("yes", "no")
        assert answer["size"] in (1, 22)

    (actor,) = summary["actors"]
    assert actor["drafter_health"]["verdict"] in ("unknown", "healthy", "doubtful", "rejected")
    assert actor["prompt_tokens_reused"] > 0
    assert actor["width"]["width"] == "joint"
    check_page((tmp_path / "out" / "report.html").read_text())
    shown = Console(width=120, file=io.StringIO())
    shown.print(render(summary))
    assert re.search(r"drafter +(too few|healthy|doubtful|rejected)", shown.file.getvalue())
    assert f"{actor['prompt_tokens_reused']} prompt tokens reused" in shown.file.getvalue()


def check_page(page: str) -> None:
    opened: list[str] = []

    class Balanced(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not [name for name, _ in attrs if name in ("src", "href")]
            if tag != "meta":
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not [name for name, _ in attrs if name in ("src", "href")]

    Balanced().feed(page)
    assert opened == []
    assert "<h3>Rows by mean round length</h3>" in page
    assert "<th>drafter</th>" in page
    assert "<th>prompt tokens reused</th>" in page
