"""What an engine actor tells Prometheus, through Ray's own metrics port. Decides and stores nothing.

Names are those that dashboards of other engines use, behind `cast_ray_` (Ray puts `ray_` before all). Every series has
the tags group and actor.
"""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

_TAGS = ("group", "actor")
_SECONDS = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0]
_LENGTHS = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0]
# Running totals of Engine.stats(), by the name of their counter.
_TOTALS = {
    "rounds": ("cast_ray_rounds_total", "Decoding rounds, each one target pass for one request"),
    "nodes_verified": ("cast_ray_verified_nodes_total", "Candidates verified, roots not counted"),
    "draft_ms": ("cast_ray_draft_ms_total", "Milliseconds spent drafting"),
    "verify_ms": ("cast_ray_verify_ms_total", "Milliseconds spent in verification forwards"),
    "host_ms": ("cast_ray_host_ms_total", "Milliseconds spent between forwards"),
    "prefill_ms": ("cast_ray_prefill_ms_total", "Milliseconds spent reading prompts"),
}
_LEVELS = {
    "running": ("cast_ray_num_requests_running", "Requests being decoded"),
    "waiting": ("cast_ray_num_requests_waiting", "Requests that wait for a place in the batch"),
    "mean_nodes": ("cast_ray_mean_width", "Candidates verified a request and round, mean since the start"),
    "mean_round_length": ("cast_ray_mean_round_length", "Tokens committed a request and round, mean since the start"),
}


class EngineMetrics:
    """The series of one actor. Cheap enough for every row; `observe_engine` is for every look at the statistics."""

    def __init__(self, group: str, actor: str) -> None:
        self._tags = {"group": group, "actor": actor}
        self._rows = Counter("cast_ray_rows_total", "Rows by outcome: ok, or the kind of error", (*_TAGS, "outcome"))
        self._generated = Counter("cast_ray_generation_tokens_total", "Tokens generated", _TAGS)
        self._prompt = Counter("cast_ray_prompt_tokens_total", "Prompt tokens of finished rows", _TAGS)
        self._seconds = Histogram(
            "cast_ray_e2e_request_latency_seconds", "From arrival at the actor to the answer", _SECONDS, _TAGS
        )
        self._first = Histogram(
            "cast_ray_time_to_first_token_seconds", "From arrival at the engine to its first token", _SECONDS, _TAGS
        )
        self._length = Histogram("cast_ray_round_length", "A row's mean tokens a round", _LENGTHS, _TAGS)
        self._totals = {key: Counter(name, text, _TAGS) for key, (name, text) in _TOTALS.items()}
        self._levels = {key: Gauge(name, text, _TAGS) for key, (name, text) in _LEVELS.items()}
        self._cache = Gauge("cast_ray_kv_cache_usage_ratio", "KV pages in use, of all", _TAGS)
        self._seen = dict.fromkeys(_TOTALS, 0.0)

    def observe_first_token(self, seconds: float) -> None:
        """From a row's arrival at the engine to its first token."""
        self._first.observe(seconds, self._tags)

    def observe_row(
        self, outcome: str, seconds: float, *, prompt_tokens: int = 0, tokens: int = 0, rounds: int = 0
    ) -> None:
        """One answered row; `outcome` is `ok` or the kind of its error."""
        self._rows.inc(1, {**self._tags, "outcome": outcome})
        self._seconds.observe(seconds, self._tags)
        # Ray's counters refuse a zero.
        if tokens:
            self._generated.inc(tokens, self._tags)
        if prompt_tokens:
            self._prompt.inc(prompt_tokens, self._tags)
        if rounds and tokens:
            self._length.observe(tokens / rounds, self._tags)

    def observe_engine(self, stats: dict[str, Any]) -> None:
        """The present `Engine.stats()`; totals grow by what is new in them."""
        for key, counter in self._totals.items():
            new = stats.get(key, 0.0) - self._seen[key]
            if new > 0:
                counter.inc(new, self._tags)
                self._seen[key] += new
        for key, gauge in self._levels.items():
            if key in stats:
                gauge.set(stats[key], self._tags)
        if stats.get("kv_pages"):
            self._cache.set(1.0 - stats["kv_pages_free"] / stats["kv_pages"], self._tags)
