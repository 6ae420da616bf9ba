"""Checks of single values that a request brings: each returns the value in its clean form, or says what is wrong.

What two values mean together is `request`'s; what the target's vocabulary has to say is `sampling.check`'s.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from cast_ray.errors import RequestError, describe


def invalid(name: str, value: object, problem: str, remedy: str) -> RequestError:
    """The error of a field, to be raised."""
    return RequestError(describe(name, value, problem, remedy))


def is_number(value: object) -> bool:
    """True for int and float, but not for bool, which Python counts among them."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int, most: int | None, remedy: str) -> None:
    """A whole number of at least `least`, and at most `most` where there is a limit."""
    wanted = f"of at least {least}" if most is None else f"in [{least}, {most}]"
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        raise invalid(name, value, f"must be a whole number {wanted}", remedy)


def number(name: str, value: Any, least: float, most: float, remedy: str, above: bool = False) -> None:
    """A number from `least` to `most`; above: not `least` itself. NaN is in no range."""
    if not is_number(value) or not least <= value <= most or (above and value == least):
        raise invalid(name, value, f"must be a number in {'(' if above else '['}{least}, {most}]", remedy)


def token_ids(name: str, given: Any, most: int | None) -> tuple[int, ...]:
    """Token ids, at most so many; whether they exist is the target's to say."""
    values = _collected(name, given, "token ids", "Write [0, 2]")
    if most is not None and len(values) > most:
        raise invalid(name, len(values), f"has more than {most} tokens", "Name fewer")
    if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in values):
        raise invalid(name, values, "must hold whole numbers of at least 0", "Write [0, 2]")
    return values


def strings(name: str, given: Any, most: int, longest: int) -> tuple[str, ...]:
    """Strings that are not empty, at most so many and so long."""
    values = _collected(name, given, "strings", 'Write ["a", "b"]')
    if len(values) > most:
        raise invalid(name, len(values), f"has more than {most} strings", "Give fewer")
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise invalid(name, value, f"must hold strings of 1 to {longest} characters", 'Write ["a", "b"]')
    return values


def token_bias(name: str, given: Any, most: int) -> dict[int, float]:
    """What to add to the logits of tokens; ids may be text, as JSON's keys are."""
    if not isinstance(given, Mapping):
        raise invalid(name, given, "must map token ids to numbers", 'Write {"50256": -100}')
    if len(given) > most:
        raise invalid(name, len(given), f"has more than {most} tokens", "Name fewer")
    clean: dict[int, float] = {}
    for token, value in given.items():
        key = int(token) if isinstance(token, str) and token.isdecimal() else token
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise invalid(name, token, "is no token id", "Use whole numbers of at least 0")
        if not is_number(value) or not -100 <= value <= 100:
            raise invalid(f"{name}[{token}]", value, "must be a number in [-100, 100]", "Use -100 to ban")
        clean[key] = float(value)
    return clean


def pattern(name: str, value: Any, longest: int) -> None:
    """A regular expression's text; whether it compiles is seen where the request is submitted."""
    if not isinstance(value, str):
        raise invalid(name, value, "must be text", "Write a regular expression")
    if not 0 < len(value) <= longest:
        raise invalid(name, value, f"must have 1 to {longest} characters", "Shorten it")


def schema(name: str, given: Any, longest: int) -> str:
    """A JSON schema as JSON, at most so many bytes, from a mapping or from JSON."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
        parsed = json.loads(text) if size <= longest else {}
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(name, given, f"is no JSON ({error})", "Give an object, or its JSON") from None
    if size > longest:
        raise invalid(name, text, f"is over {longest} bytes", "Simplify it")
    if not isinstance(parsed, dict | bool):
        raise invalid(name, text, "is no JSON schema", 'Write {"type": "object", …}')
    return text


def _collected(name: str, values: Any, kind: str, remedy: str) -> tuple[Any, ...]:
    if isinstance(values, str | Mapping) or not isinstance(values, Collection):
        raise invalid(name, values, f"must be a list of {kind}", remedy)
    return tuple(values)
