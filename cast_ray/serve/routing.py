"""Which replica gets a request: the one predicted to answer it first. A request router of Ray Serve's.

Every handle has its own router; what others sent is known from the replicas' reports. Serve copies this module's
classes by value into the processes that route, so everything else that they need is in `ledger`.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cast_ray.serve.ledger import Cost, Ledger, announce, rank
from cast_ray.serve.wire import Ask


class FinishTimeRouter(FIFOMixin, RequestRouter):
    """Set in the engine deployment's `RequestRouterConfig`.

    First come, first served: Serve's other way matches requests by an id that all calls made for one HTTP request
    share, and would leave all but one of its samples waiting.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve."""
        self._ledgers: dict[ReplicaID, Ledger] = {}
        self._turn = 0
        announce(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica a rank of its own: Serve goes to the next where one is full."""
        if not candidate_replicas:
            return []
        now = time.monotonic()
        # Ties are broken in turn, so that equal and idle replicas share the work.
        self._turn += 1
        shift = self._turn % len(candidate_replicas)
        replicas = [*candidate_replicas[shift:], *candidate_replicas[:shift]]
        ask = _ask(pending_request)
        hashes = ask.prefix_hashes() if ask is not None else []
        costs, loads, rates = [], [], []
        for replica in replicas:
            stats, ledger = replica.routing_stats or {}, self._ledger(replica.replica_id)
            ledger.update(stats, now)
            cost = Cost.of(ask, stats.get("mean_tokens")).at(ledger.known(hashes)) if ask is not None else 0.0
            costs.append(cost)
            loads.append(ledger.others + ledger.sent)
            rates.append(stats.get("tokens_per_s"))
        return [[replicas[index]] for index in rank(costs, loads, rates)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica took the request."""
        ask = _ask(pending_request)
        if ask is None:
            return
        ledger, hashes = self._ledger(replica_id), ask.prefix_hashes()
        replica = self.curr_replicas.get(replica_id)
        mean = (replica.routing_stats or {}).get("mean_tokens") if replica is not None else None
        ledger.send(pending_request.metadata.internal_request_id, Cost.of(ask, mean).at(ledger.known(hashes)))
        ledger.remember(hashes)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve, however the request ended."""
        if ledger := self._ledgers.get(replica_id):
            ledger.complete(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve; the ledgers of replicas that are gone go too."""
        super().update_replicas(replicas)
        here = {replica.replica_id for replica in replicas}
        for replica_id in set(self._ledgers) - here:
            del self._ledgers[replica_id]

    def _ledger(self, replica_id: ReplicaID) -> Ledger:
        return self._ledgers.setdefault(replica_id, Ledger())


def _ask(pending: PendingRequest | None) -> Ask | None:
    if pending is None:
        return None
    return next((one for one in pending.args if isinstance(one, Ask)), None)
