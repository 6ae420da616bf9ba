"""The probe measures what the engine may ask for, within its time; a profile is reused where everything matches."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.calibration import probe as probing
from cast_ray.calibration.measure import GOING_ON_S
from cast_ray.calibration.probe import CLOSER_POINTS, Probe
from cast_ray.calibration.profile import Profile, load_profile, profile_key, profile_path, save_profile
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable
from tests.support import qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "target", qwen3())
    save_tiny_drafter(folder / "drafter", target=qwen3())
    return {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "dtype": "float32",
        "device": "cpu",
        "max_batch_size": 4,
        "max_nodes": 31,
    }


def probe_of(engine: Engine) -> Probe:
    return Probe(
        engine._parts.target,
        engine._parts.drafter,
        page_size=16,
        max_batch=4,
        max_nodes=31,
        max_context=engine.max_context,
        top_k=8,
    )


def test_all_widths_batches_and_contexts_are_measured(settings: dict[str, Any]) -> None:
    table, complete = probe_of(Engine(EngineConfig(**settings, width="chain"))).measure(120)
    assert complete
    points = {(p["tokens"], p["batch"], p["context"]) for p in table.to_dict()["verify"]}
    assert {(count, 1, 256) for count in (1, 2, 4, 8, 16, 32)} <= points
    assert len({count for count, batch, context in points if (batch, context) == (1, 256)}) <= 6 + CLOSER_POINTS
    assert {(b * (n + 1), b, 256) for b in (2, 4) for n in (0, 3, 7, 15, 31)} <= points
    # The model ends at 512 positions, a tree and its root lie behind the context.
    assert {(n + 1, 1, 480) for n in (0, 7, 31)} <= points
    drafts = {(p["batch"], p["context"]) for p in table.to_dict()["draft"]}
    assert drafts == {(1, 256), (4, 256), (1, 480), (2, 256)}
    assert all(p["ms"] > 0 for p in table.to_dict()["verify"])


def test_captured_forwards_are_measured_at_the_ends_of_their_buckets(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings, width="chain", graphs="on", graph_seconds=0.0)
    probe = probe_of(Engine(config))
    table, complete = probe.measure(120)
    assert complete
    counts = {point.tokens for point in table.verify if (point.batch, point.context) == (1, 256)}
    assert counts == {1, 2, 4, 8, 16, 24, 32}
    assert table.buckets is not None
    within = table.verify_ms([17, 20, 24], 1, 256)
    assert within[0] == within[1] == within[2]
    # A profile of other buckets is another device's.
    assert probe.settings() != probe_of(Engine(EngineConfig(**settings, width="chain"))).settings()


def test_what_is_measured_fits_the_pool_and_leaves_it_usable(settings: dict[str, Any]) -> None:
    config = EngineConfig(
        **settings, kv_cache_tokens=96, profile_dir=Path(settings["target"]) / "p", width="deployment"
    )
    engine = Engine(config)
    contexts = {p["context"] for p in engine.stats()["latency"]["verify"]}
    assert contexts == {64}
    out = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20))[0]
    plain = Engine(EngineConfig(**settings, width="ar")).generate([[1, 2, 3]], SamplingParams(max_tokens=20))[0]
    assert out.token_ids == plain.token_ids


def test_a_probe_out_of_time_gives_a_table_and_the_next_start_goes_on(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cast_ray.calibration.measure.GOING_ON_S", 120.0)  # however busy the machine is
    config = {**settings, "width": "deployment", "profile_dir": tmp_path}
    with caplog.at_level(logging.WARNING):
        short = Engine(EngineConfig(**config, probe_seconds=1e-6)).stats()["latency"]
    assert (len(short["verify"]), len(short["draft"])) == (1, 1)
    assert "too short to measure" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        whole = Engine(EngineConfig(**config, probe_seconds=120)).stats()["latency"]
    assert len(whole["verify"]) > 15
    measured = [(point["tokens"], point["batch"], point["context"]) for point in whole["verify"]]
    assert len(set(measured)) == len(measured)
    assert (1, 1, 256) in measured
    assert short["draft"][0] in whole["draft"]
    assert caplog.text == ""


def test_going_on_takes_a_start_a_few_seconds_at_most(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def measure(probe: Probe, seconds: float, known: LatencyTable | None) -> tuple[LatencyTable, bool]:
        given.append((seconds, known is not None))
        return LatencyTable([LatencyPoint(1, 1, 0, 2.0)], [DraftPoint(1, 0, 1.0)]), False

    monkeypatch.setattr(Probe, "measure", measure)
    for _ in range(2):
        Engine(EngineConfig(**settings, width="deployment", profile_dir=tmp_path, probe_seconds=25))
    assert given == [(25, False), (GOING_ON_S, True)]


def test_a_profile_is_measured_once_and_then_loaded(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    measure = Probe.measure
    monkeypatch.setattr(Probe, "measure", lambda *given: measured.append(1) or measure(*given))
    config = {**settings, "width": "deployment", "profile_dir": tmp_path}
    first = Engine(EngineConfig(**config)).stats()["latency"]
    assert Engine(EngineConfig(**config)).stats()["latency"] == first
    assert len(measured) == 1
    Engine(EngineConfig(**{**config, "dtype": "bfloat16"}))
    for change in ({"max_batch_size": 2}, {"max_nodes": 15}, {"max_context": 300}, {"candidates_per_depth": 4}):
        Engine(EngineConfig(**{**config, **change}))
    assert len(measured) == 6


def saved_profile(folder: Path) -> tuple[dict[str, Any], Path]:
    table = LatencyTable([LatencyPoint(1, 1, 0, 2.0)], [DraftPoint(1, 0, 1.0)], 0.1)
    key = profile_key(torch.device("cpu"), torch.float32, {"name": "x"}, None, {})
    path = save_profile(key, Profile(table, complete=True), folder)
    loaded = load_profile(key, folder)
    assert loaded is not None
    assert loaded.complete
    assert loaded.table.to_dict() == table.to_dict()
    return key, path


@pytest.mark.parametrize("damage", ["{", "[]", "7", '{"key": {}, "latency": {}}', '{"key": 3}', ""])
def test_a_damaged_profile_is_named_and_ignored(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    key, path = saved_profile(tmp_path)
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert load_profile(key, tmp_path) is None
    assert f"{path} is ignored and measured anew" in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"torch": "0.1"}, "torch 0.1, here"),
        ({"format": 1}, "format 1, here"),
        ({"device": "another"}, "device another, here"),
        ({"target": {"name": "y"}}, "target {'name': 'y'}, here {'name': 'x'}"),
    ],
)
def test_a_foreign_or_older_profile_is_named_and_ignored(
    tmp_path: Path, change: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, path = saved_profile(tmp_path)
    saved = json.loads(path.read_text())
    saved["key"].update(change)
    path.write_text(json.dumps(saved))
    with caplog.at_level(logging.WARNING):
        assert load_profile(key, tmp_path) is None
    assert str(path) in caplog.text
    assert named in caplog.text


def test_a_profile_of_other_versions_lies_where_it_is_found_and_one_of_another_device_elsewhere(tmp_path: Path) -> None:
    key, path = saved_profile(tmp_path)
    assert profile_path({**key, "torch": "0.1", "format": 1}, tmp_path) == path
    for change in ({"device": "another"}, {"dtype": "bfloat16"}, {"target": {}}, {"drafter": {}}, {"threads": 99}):
        assert profile_path({**key, **change}, tmp_path) != path


def test_a_bad_profile_is_measured_anew_and_replaced(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(**{**settings, "width": "deployment", "profile_dir": tmp_path, "max_context": 200})
    first = Engine(config).stats()["latency"]
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text()[:100])
    again = Engine(config).stats()["latency"]
    assert "measured anew" in caplog.text
    assert again["verify"] != first["verify"]
    assert Engine(config).stats()["latency"] == again


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    key = profile_key(torch.device("cpu"), torch.float32, {"name": "x"}, None, {})
    save_profile(key, Profile(LatencyTable([LatencyPoint(1, 1, 0, 2.0)]), complete=True), blocker / "folder")
    assert "could not be saved" in caplog.text
    assert profile_path(key, tmp_path) != profile_path({**key, "threads": 99}, tmp_path)


def test_the_median_is_taken_not_the_mean(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(probing.time, "perf_counter", lambda: clock[0])
    durations = iter([0.5, 0.010, 0.012, 0.9, 0.011, 0.010, 0.5])

    def run() -> torch.Tensor:
        clock[0] += next(durations)
        return torch.zeros(1)

    median, noise = probe_of(Engine(EngineConfig(**settings, width="chain")))._time(run)
    # The first run warms up; the stall of 900 ms uses up the point's time and moves the median by nothing.
    assert median == pytest.approx(12.0)
    assert noise == pytest.approx(2.0)
