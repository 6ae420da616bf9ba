"""How many replicas are wanted: tokens outstanding over what one replica is to have. Runs in Serve's controller."""

from __future__ import annotations

import math
from typing import Any

METRIC = "outstanding_tokens"


class ByOutstandingTokens:
    """A Serve autoscaling policy. target_tokens: tokens outstanding that one replica is to have.

    It scales up at once and down by one at a time, when the rest would still be below their target by a quarter: a
    replica takes long to load its model, and to end one a moment early costs more than to keep it a moment too long.
    """

    def __init__(self, target_tokens: int) -> None:
        self._target = target_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Replicas wanted, and no state."""
        metrics = context.aggregated_metrics or {}
        outstanding = sum((metrics.get(METRIC) or {}).values())
        # What still waits for a replica counts like what an average request aboard has left.
        queued = context.total_queued_requests or 0
        aboard = max(1.0, (context.total_num_requests or 0) - queued)
        outstanding += queued * (outstanding / aboard)
        return self.wanted(outstanding, context.current_num_replicas), {}

    def wanted(self, outstanding: float, now: int) -> int:
        """Replicas for so many tokens, given how many there are."""
        needed = max(1, math.ceil(outstanding / self._target))
        if needed >= now:
            return needed
        return now - 1 if outstanding <= 0.75 * self._target * (now - 1) else now
