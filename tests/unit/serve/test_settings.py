"""Settings of a server: safe unless somebody says otherwise, and the same from every side."""

from __future__ import annotations

from pathlib import Path

import pytest

from cast_ray.config import ServeConfig
from cast_ray.errors import ConfigError
from cast_ray.serve.app import _nested
from cast_ray.settings import load_settings


def test_the_default_is_this_machine_only_and_others_need_keys() -> None:
    assert ServeConfig().host == "127.0.0.1"
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        ServeConfig(host="0.0.0.0")
    assert ServeConfig(host="0.0.0.0", keys_file=Path("keys.yaml")).host == "0.0.0.0"


def test_a_model_is_not_named_by_its_path() -> None:
    assert ServeConfig(engine={"target": "/models/secret/Qwen3-8B/"}).model_name == "Qwen3-8B"
    assert ServeConfig(engine={"target": "Qwen/Qwen3-8B"}, model="mine").model_name == "mine"


def test_settings_come_with_dots_nested_or_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("engine: {dtype: float32, width: ar}\nreplicas: 2\n")
    given = _nested({"engine.width": "chain", "engine": {"max_batch_size": 3}, "limits.n": 2})
    config = load_settings(ServeConfig, path, given)
    assert (config.engine.width, config.engine.dtype, config.engine.max_batch_size) == ("chain", "float32", 3)
    assert (config.replicas, config.limits.n) == (2, 2)
    with pytest.raises(ConfigError, match="stands beside"):
        _nested({"engine": "x", "engine.width": "ar"})
    with pytest.raises(ConfigError, match="max_replicas"):
        ServeConfig(replicas=3, max_replicas=2)
