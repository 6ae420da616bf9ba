"""What `cast-ray serve` says of itself, in words: what it starts, and once it is up what it serves, how and where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cast_ray.config import LOOPBACK, ServeConfig

_ANY = ("0.0.0.0", "::")


def starting(config: ServeConfig) -> str:
    """Before the replicas load."""
    engine = config.engine
    return f"starting {config.model_name}: target {engine.target}, drafter {engine.drafter}, width {engine.width}"


def summary(config: ServeConfig, engines: Sequence[dict[str, Any]]) -> str:
    """engines: `starting.SHOWN` of those that are up."""
    where = address(config)
    rows = [("API", f"{where}/v1"), ("page", f"{where}/"), ("model", config.model_name)]
    rows += _engines(engines, config.engine.max_nodes)
    rows.append(("keys", _keys(config)))
    rows.append(("try", _example(config, where)))
    return "\n".join(["ready", *(f"  {name:<9} {text}" for name, text in rows)])


def address(config: ServeConfig) -> str:
    """Where a client on this machine finds it."""
    host = "127.0.0.1" if config.host in _ANY else config.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


def _engines(engines: Sequence[dict[str, Any]], most: int) -> list[tuple[str, str]]:
    if not engines:
        return []
    first = engines[0]
    about = [engine["device"] for engine in engines]
    devices = Counter(f"{one['name']}, {one['dtype']}, {one['threads']} CPU threads" for one in about)
    rows = [
        ("target", first["target"]),
        ("drafter", first["drafter"]),
        ("width", _width(first["width"], most)),
        ("replicas", "; ".join(f"{count} on {device}" for device, count in devices.items())),
    ]
    notes = dict.fromkeys(note for engine in engines for note in engine.get("notes", ()))
    return [*rows, *(("note", note) for note in notes)]


def _width(report: dict[str, Any], most: int) -> str:
    most = report.get("max_nodes", most)
    return f"{report['width']}, at most {most} candidates a request" if most else f"{report['width']}, no candidates"


def _keys(config: ServeConfig) -> str:
    if config.keys_file is not None:
        return f"needed, those in {config.keys_file}"
    reach = "only this machine reaches it" if config.host in LOOPBACK else f"served at {config.host}"
    return f"none needed; {reach}"


def _example(config: ServeConfig, where: str) -> str:
    body = {"model": config.model_name, "messages": [{"role": "user", "content": "Hello"}]}
    key = " -H 'Authorization: Bearer KEY'" if config.keys_file is not None else ""
    return f"curl {where}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
