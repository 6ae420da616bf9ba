"""What `cast-ray serve` says once it is up: where, what, on what, and how to try it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cast_ray.config import ServeConfig
from cast_ray.serve.summary import summary


def engine(name: str = "AMD x2", notes: tuple[str, ...] = (), **width: Any) -> dict[str, Any]:
    device = {"name": name, "dtype": "float32", "threads": 2}
    return {"target": "embedded", "drafter": "embedded", "device": device, "width": width, "notes": notes}


def lines(config: ServeConfig, *engines: dict[str, Any]) -> list[str]:
    return summary(config, engines).splitlines()


def test_the_summary_names_url_model_drafter_devices_width_keys_and_a_request() -> None:
    shown = lines(ServeConfig(port=9000), engine(width="joint"), engine(width="joint"), engine("T4", width="joint"))
    assert shown[0] == "ready"
    assert "  API       http://127.0.0.1:9000/v1" in shown
    assert "  drafter   embedded" in shown
    assert "  width     joint, at most 63 candidates a request" in shown
    assert "  replicas  2 on AMD x2, float32, 2 CPU threads; 1 on T4, float32, 2 CPU threads" in shown
    assert "  keys      none needed; only this machine reaches it" in shown
    assert shown[-1].startswith("  try       curl http://127.0.0.1:9000/v1/chat/completions ")
    assert "Authorization" not in shown[-1]


def test_with_keys_the_request_has_one_and_an_address_for_all_is_tried_at_this_machine() -> None:
    config = ServeConfig(host="0.0.0.0", keys_file=Path("keys.yaml"), engine={"width": "ar"})
    shown = lines(config, engine(width="ar", max_nodes=0, notes=("no trees here",)))
    assert "  width     ar, no candidates" in shown
    assert "  keys      needed, those in keys.yaml" in shown
    assert "  note      no trees here" in shown
    assert "curl http://127.0.0.1:8000/" in shown[-1]
    assert "-H 'Authorization: Bearer KEY'" in shown[-1]


def test_without_a_word_of_its_engines_the_summary_says_the_rest() -> None:
    shown = "\n".join(lines(ServeConfig()))
    assert "drafter" not in shown
    assert "\n  API " in shown
    assert "\n  try " in shown
