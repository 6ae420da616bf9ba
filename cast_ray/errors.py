"""One family of errors. Each message says what is wrong, where, and what to do about it.

Catch `CastRayError` for all of them. `RequestError` concerns one request or row and never harms another;
the rest stop the engine or the job before it does any work.
"""

from __future__ import annotations


class CastRayError(Exception):
    """Base of every error that cast_ray raises on purpose."""


class ConfigError(CastRayError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class ModelError(CastRayError):
    """A target cannot be found, read, or run."""


class DrafterError(CastRayError):
    """A drafter cannot be read, or does not match its target."""


class InputError(CastRayError):
    """An input dataset is missing, empty, or lacks a column."""


class RequestError(CastRayError, ValueError):
    """One request is invalid. Others go on."""


class QueueFullError(RequestError):
    """The engine has as many waiting requests as it takes; the same request may be sent again later."""


class EngineError(CastRayError, RuntimeError):
    """The engine itself failed; every pending request fails with this cause."""


def describe(field: str, value: object, problem: str, remedy: str) -> str:
    """The house form of a message: `field=value: problem. Remedy.`"""
    shown = repr(value)
    if len(shown) > 200:
        shown = shown[:197] + "..."
    return f"{field}={shown}: {problem}. {remedy}"
