"""`--dry-run`: the plan of a job and one rendered prompt. Starts no engine and writes nothing."""

from __future__ import annotations

from typing import Any

from cast_ray.batch.formats import InputPlan
from cast_ray.batch.requests import RequestMaker
from cast_ray.batch.source import Reading, read_tables
from cast_ray.pool.rows import RowRequest

_SAID = ("max_tokens", "temperature", "seed", "n", "choices", "regex", "json_schema", "sampling")


def show_plan(config: Any, plan: InputPlan, maker: RequestMaker, left: int, output_format: str) -> dict[str, Any]:
    """What would be done. config: a JobConfig. left: rows that are still to be answered."""
    request, answer = _first_request(plan, maker)
    shown: dict[str, Any] = {
        "input": plan.place.shown,
        "format": "OpenAI Batch" if plan.is_openai else plan.format,
        "files": len(plan.files),
        "rows": plan.rows,
        "left_to_do": left,
        "columns": {column.name: str(column.type) for column in plan.schema},
        "rows_named_by": plan.id_column,
        "repeated_ids": sum(len(piece.repeats) for piece in plan.pieces),
        "prompt_from": list(maker.columns),
        "sampling": {name: value for name in _SAID if (value := getattr(config, name)) not in (None, (), {})},
        "target": config.engine.target,
        "output": config.output,
        "output_format": output_format,
    }
    if request is None:
        return {**shown, "first_row_error": answer}
    text, tokens = render_prompt(request, maker)
    return {**shown, "first_row": request.row_id, "prompt": text, "prompt_tokens": tokens}


def _first_request(plan: InputPlan, maker: RequestMaker) -> tuple[RowRequest | None, str | None]:
    """The first of the first rows that makes a request, or what is wrong with the first."""
    reason: str | None = None
    for table in read_tables(Reading.of(plan), plan.pieces[0]):
        for made in maker.make(table)[1]:
            if isinstance(made, list):
                return made[0], None
            reason = reason or made.error
    return None, reason


def render_prompt(request: RowRequest, maker: RequestMaker) -> tuple[str, int]:
    """The prompt as the target sees it, and its tokens. Loads the tokenizer only. Raises ModelError."""
    tokenizer = maker.tokenizer()
    prompt = request.prompt
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    elif isinstance(prompt[0], dict):
        ids = list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))
    else:
        ids = list(prompt)
    return tokenizer.decode(ids), len(ids)


def render(plan: dict[str, Any]) -> str:
    """The plan for a terminal or a log."""
    lines = ["Plan (dry run: nothing is started or written)"]
    for name, value in plan.items():
        if name in ("prompt", "columns"):
            continue
        lines.append(f"  {name.replace('_', ' '):<16} {value}")
    lines.append(f"  {'columns':<16} {', '.join(f'{name}: {kind}' for name, kind in plan['columns'].items())}")
    if "prompt" in plan:
        lines += ["", f"Prompt of row {plan['first_row']} ({plan['prompt_tokens']} tokens):", plan["prompt"]]
    return "\n".join(lines)
