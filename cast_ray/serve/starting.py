"""What replicas say while they start, for the command that waits for them: a replica that loads answers no call.

It goes through Ray's key-value store and is lost where nobody looks. Requests are never a part of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from cast_ray import errors
from cast_ray.errors import CastRayError

NAMESPACE = b"cast_ray"
# Of an engine's statistics, what a summary of the start shows.
SHOWN = ("target", "drafter", "notes", "device", "width")


class Told(logging.Handler):
    """What one replica tells. key: where; None outside Ray, where nobody would hear it."""

    def __init__(self, key: str | None) -> None:
        super().__init__()
        self._key = key
        self._found: dict[str, Any] = {"lines": []}

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self._found["lines"].append(" ".join(record.getMessage().split()))
        self._show()

    def ready(self, about: dict[str, Any]) -> None:
        """It is up. about: its engine's `stats`."""
        self._found["engine"] = {name: about[name] for name in SHOWN if name in about}
        self._show()

    def failed(self, error: CastRayError) -> None:
        """It cannot start."""
        self._found["failure"] = [type(error).__name__, str(error)]
        self._show()

    def _show(self) -> None:
        if self._key is not None:
            _internal_kv_put(self._key, json.dumps(self._found, default=str), overwrite=True, namespace=NAMESPACE)


@contextmanager
def telling(app: str, replica: str) -> Iterator[Told]:
    """What the package logs meanwhile is told, and why it could not go on."""
    logger = logging.getLogger("cast_ray")
    told, level = Told(f"{_prefix(app)}{replica}" if ray.is_initialized() else None), logger.level
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    try:
        yield told
    except CastRayError as error:
        told.failed(error)
        raise
    finally:
        logger.removeHandler(told)
        logger.setLevel(level)


class Listener:
    """Hears the replicas of an application that start from now on. engines: of those that are up, see `SHOWN`."""

    def __init__(self, app: str) -> None:
        self._prefix = _prefix(app)
        self._heard: dict[bytes, int] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        _internal_kv_del(self._prefix, del_by_prefix=True, namespace=NAMESPACE)

    def news(self) -> list[tuple[str, str]]:
        """Lines since the last look, each behind the name of its replica. Raises what a replica could not start for:
        Serve would try it again, and then say only that it failed."""
        found = []
        for key in sorted(_internal_kv_list(self._prefix, namespace=NAMESPACE)):
            told = json.loads(_internal_kv_get(key, namespace=NAMESPACE) or b"{}")
            if told.get("failure"):
                kind, message = told["failure"]
                raise getattr(errors, kind)(message)
            name, lines = key.decode().removeprefix(self._prefix), told.get("lines", [])
            found += [(name, line) for line in lines[self._heard.get(key, 0) :]]
            self._heard[key] = len(lines)
            if "engine" in told:
                self.engines[name] = told["engine"]
        return found


def _prefix(app: str) -> str:
    return f"starting/{app}/"
