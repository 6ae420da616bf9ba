"""Options of the command line that are settings: their help and default are said once, in the settings class."""

from __future__ import annotations

from typing import Any

import typer

from cast_ray.config import Settings


def option(kind: type[Settings], field: str, *names: str) -> Any:
    """An option for a field of a settings class; its value is None when it is not said."""
    about = kind.model_fields[field]
    text = about.description or ""
    # Not the first of several values, `auto: ...` or `parquet, jsonl or ...`: they are to be typed as they stand.
    if text.partition(" ")[0].rstrip(";").isalpha():
        text = text[:1].upper() + text[1:]
    default = about.get_default(call_default_factory=True)
    if default is not None and default is not False and default not in ((), {}):
        text += f" (default {default})"
    return typer.Option(*(names or (f"--{field.replace('_', '-')}",)), help=text, show_default=False)
