"""Prompts from a Jinja template over a row's columns.

Sandboxed, since templates travel in configuration files: a template computes text from the row and does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cast_ray.errors import ConfigError, InputError, RequestError, describe


class _NullValue(Exception):
    """A null was to be printed, which would read `None`."""


def _printable(value: Any) -> Any:
    if value is None:
        raise _NullValue
    return value


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, finalize=_printable, keep_trailing_newline=True
)


class RowTemplate:
    """A template, compiled. field: the setting that it is the value of, for messages."""

    def __init__(self, field: str, source: str) -> None:
        self.field = field
        self.source = source
        try:
            self.columns = sorted(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            problem = f"is no Jinja template ({str(error).rstrip('.')}{f', line {line}' if line else ''})"
            raise ConfigError(describe(field, source, problem, 'Write as in "Summarise: {{ text }}"')) from None
        self.columns = [name for name in self.columns if name not in _ENVIRONMENT.globals]

    def check(self, columns: Iterable[str]) -> None:
        """Raise InputError where the template asks for a column that is not there, naming those that are."""
        names = list(columns)
        if missing := [name for name in self.columns if name not in names]:
            problem = f"asks for {', '.join(missing)}, no column of the input"
            remedy = f"Columns there: {', '.join(names) or 'none'}"
            raise InputError(describe(self.field, self.source, problem, remedy))

    def render(self, row: dict[str, Any]) -> str:
        """The text for one row. Raises RequestError that says what is wrong with the row."""
        try:
            return self._template.render(row)
        except _NullValue:
            nulls = ", ".join(name for name in self.columns if row.get(name) is None) or "a value"
            problem = f"prints {nulls}, which is null in this row"
            remedy = "Give the row a value, or ask for it with {% if column %}"
            raise RequestError(describe(self.field, self.source, problem, remedy)) from None
        except Exception as error:  # of the template's own making: a filter on the wrong type, an index too far
            problem = f"cannot be filled from this row ({type(error).__name__}: {error})"
            remedy = f"Mend the row or the template. Columns there: {', '.join(row)}"
            raise RequestError(describe(self.field, self.source, problem, remedy)) from None
