"""What an engine says of itself, as plain values: totals, its width policy's report, the latency curve, its memory."""

from __future__ import annotations

from typing import Any

import torch

from cast_ray.calibration.profile import device_name
from cast_ray.engine.health import DrafterHealth
from cast_ray.engine.scheduler import Scheduler
from cast_ray.engine.setup import Parts
from cast_ray.engine.totals import Totals
from cast_ray.width.policy import WidthPolicy


def report(
    parts: Parts, totals: Totals, scheduler: Scheduler, policy: WidthPolicy, health: DrafterHealth | None
) -> dict[str, Any]:
    """See `Engine.stats`. Times in wall ms."""
    rounds = totals.request_rounds
    return {
        "target": parts.loaded.name,
        "drafter": parts.drafter_name,
        "notes": list(parts.notes),
        "device": {
            "name": device_name(parts.device),
            "dtype": str(parts.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        },
        "attention": {"backend": parts.attention.name, "reason": parts.attention.reason},
        "graphs": parts.target.graphs.report() if parts.target.graphs is not None else None,
        "requests_finished": totals.requests_finished,
        "finish_reasons": dict(totals.finish_reasons),
        "input_tokens": totals.input_tokens,
        "tokens_generated": totals.tokens_generated,
        "steps": totals.steps,
        "rounds": rounds,
        "mean_round_length": totals.tokens_committed / rounds if rounds else 0.0,
        "nodes_verified": totals.nodes_verified,
        "mean_nodes": totals.nodes_verified / rounds if rounds else 0.0,
        "accepted_by_source": dict(totals.accepted),
        "draft_ms": totals.draft_ms,
        "verify_ms": totals.verify_ms,
        "host_ms": sum(totals.host.values()),
        "host": dict(totals.host),
        "hidden_ms": totals.hidden_ms,
        "prefill_ms": totals.prefill_ms,
        "target_tokens": totals.target_tokens,
        "width": policy.report(),
        "drafter_health": health.report() if health else None,
        "lookup": parts.lookup.report() if parts.lookup else None,
        "latency": parts.latency.to_dict() if parts.latency else None,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "preemptions": scheduler.preemptions,
        "kv_pages_free": scheduler.pool.num_available,
        "kv_pages_cached": scheduler.pool.num_idle,
        "kv_pages": parts.num_pages,
        "prefix_tokens_reused": scheduler.prefixes.tokens_reused,
    }
