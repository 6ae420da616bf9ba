"""`--dry-run`: the plan of a job and one rendered prompt. Starts no engine, reads no weights and writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import Any

import yaml

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
        **_engines(config),
        "output": config.output,
        "output_format": output_format,
    }
    if request is None:
        return {**shown, "first_row_error": answer}
    text, tokens = render_prompt(request, maker)
    return {**shown, "first_row": request.row_id, "prompt": text, "prompt_tokens": tokens}


def _engines(config: Any) -> dict[str, Any]:
    """What would decode: targets, drafters and widths that cannot be used are found out here."""
    if config.attach is not None:
        return {"target": config.engine.target, "engines": f"those of the application {config.attach}"}
    from cast_ray.engine.preview import preview  # loads torch

    shown: dict[str, Any] = {}
    with _warnings() as warnings:
        found = preview(config.engine)
        for group in config.pool.groups:
            own = preview(config.engine.replace(**group.engine)) if group.engine else found
            if own != found:
                shown[f"group {group.name}"] = f"drafter {own.drafter}; width {own.width}"
    told = {"target": found.target, "drafter": found.drafter, "width": found.width, **shown}
    return {**told, "warnings": list(dict.fromkeys(warnings))} if warnings else told


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the package warns of meanwhile, instead of in the log."""
    logger, kept, found = logging.getLogger("cast_ray"), BufferingHandler(1000), list[str]()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(kept)
    try:
        yield found
        found += [record.getMessage() for record in kept.buffer if record.levelno >= logging.WARNING]
    finally:
        logger.removeHandler(kept)
        logger.propagate = before


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
        if name not in ("prompt", "columns", "warnings"):
            lines.append(f"  {name.replace('_', ' '):<16} {_words(value)}")
    lines.append(f"  {'columns':<16} {', '.join(f'{name}: {kind}' for name, kind in plan['columns'].items())}")
    lines += [f"  {'warning':<16} {warning}" for warning in plan.get("warnings", ())]
    if "prompt" in plan:
        lines += ["", f"Prompt of row {plan['first_row']} ({plan['prompt_tokens']} tokens):", plan["prompt"]]
    return "\n".join(lines)


def _words(value: Any) -> str:
    """A value as a file of settings would have it, without the outer brackets."""
    if not isinstance(value, dict | list | tuple):
        return "none" if value is None else str(value)
    flat = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return flat.strip()[1:-1] or "none"
