"""The replicas of a running application as a batch job's pool, in the form of `pool.pool.EnginePool`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Self

from cast_ray.serve.client import FIRST_SLOTS, ServeClient


@dataclass(frozen=True)
class AttachedMembers:
    """What a client needs, in any process of the cluster. attempts: replicas that a row may go down with. lookup_scope:
    the job's own, see `Engine.submit`."""

    app: str
    attempts: int
    lookup_scope: str | None = None

    def client(self) -> ServeClient:
        """A client of the application."""
        return ServeClient(self.app, self.attempts, self.lookup_scope)


class AttachedPool:
    """Raises EngineError from the constructor where no such application runs."""

    def __init__(self, app: str, attempts: int = 3) -> None:
        self._app = app
        self._attempts = attempts
        self._client = ServeClient(app, attempts)
        self._scope = f"job {secrets.token_hex(8)}"
        self.failed: dict[str, str] = {}
        self.warnings: list[str] = []

    def __len__(self) -> int:
        return len(self._client.about())

    @property
    def capacity(self) -> int:
        """Rows that a client keeps aboard all replicas."""
        return max(1, len(self)) * FIRST_SLOTS

    @property
    def members(self) -> AttachedMembers:
        """As of `EnginePool`."""
        return AttachedMembers(self._app, self._attempts, self._scope)

    def stats(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """The replicas' statistics by name. They are of all that the replicas do, not of this job alone."""
        return {one["name"]: {"group": self._app, **one} for one in self._client.about(timeout_s)}

    def shutdown(self) -> None:
        """The application goes on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
