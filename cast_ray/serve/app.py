"""`build_app`: the Serve application. An API deployment in front, and the engine replicas behind it.

For `serve run cast_ray.serve.app:build_app engine.target=my/model`, for a Serve config file, and for `cast-ray serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cast_ray.config import EngineConfig, ServeConfig
from cast_ray.errors import ConfigError, describe
from cast_ray.pool.cluster import cluster_nodes
from cast_ray.pool.placement import threads_each
from cast_ray.serve.guard import App
from cast_ray.serve.replica import EngineFactory, EngineReplica, default_engine
from cast_ray.serve.routing import FinishTimeRouter
from cast_ray.serve.scaling import ByOutstandingTokens
from cast_ray.settings import load_settings

ENGINE, API = "engine", "api"
# Streams that one API process holds; it only waits for them.
API_REQUESTS = 4096
ROUTING_REPORT_S = 2.0
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 10.0, 30.0


def build_app(args: Mapping[str, Any] | None = None, *, engine_factory: EngineFactory = default_engine) -> Application:
    """The application of a `ServeConfig`.

    args: its settings, nested or with dots (`engine.dtype`), and `config`, a YAML file that they win over. Raises
    ConfigError for what is no setting.
    """
    given = _nested(args or {})
    path = given.pop("config", None)
    return application(load_settings(ServeConfig, path, given), engine_factory)


def application(config: ServeConfig, factory: EngineFactory) -> Application:
    """The same for settings that are read."""
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE,
        max_ongoing_requests=config.max_ongoing,
        max_queued_requests=config.max_queued,
        ray_actor_options=_resources(config),
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class=FinishTimeRouter, request_routing_stats_period_s=ROUTING_REPORT_S
        ),
        **_scale(config),
    )

    def make_api() -> App:
        # Here and not above: it belongs to the API's process, which has no use for torch.
        from cast_ray.serve.api import create_api

        return create_api(config, serve.get_deployment_handle(ENGINE))

    front = serve.deployment(
        serve.ingress(make_api)(_Front),
        name=API,
        num_replicas=1,
        max_ongoing_requests=API_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain_s,
    )
    return front.bind(engine.bind(_engine(config), factory, config.app))


class _Front:
    """The ingress; all of it is in the ASGI app. It is bound to the engines, so that they are deployed with it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine


def _engine(config: ServeConfig) -> EngineConfig:
    """The engine's settings, with the threads of one that computes on CPUs: Ray tells a worker of less than one CPU to
    use one thread."""
    import ray

    if config.engine.threads is not None or config.num_cpus >= 1 or not ray.is_initialized() or _gpus(config):
        return config.engine
    most = config.max_replicas or config.replicas or _devices(config)
    return config.engine.replace(threads=threads_each(config.engine, most, cluster_nodes()))


def _scale(config: ServeConfig) -> dict[str, Any]:
    least = config.replicas or _devices(config)
    if config.max_replicas is None:
        return {"num_replicas": least}
    policy = AutoscalingPolicy(
        policy_function=ByOutstandingTokens, policy_kwargs={"target_tokens": config.target_tokens}
    )
    scaling = AutoscalingConfig(min_replicas=least, max_replicas=config.max_replicas, policy=policy)
    return {"autoscaling_config": scaling}


def _resources(config: ServeConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": config.num_cpus,
        "num_gpus": _gpus(config),
        "resources": dict(config.resources),
    }
    if config.accelerator_type is not None:
        options["accelerator_type"] = config.accelerator_type
    return options


def _gpus(config: ServeConfig) -> float:
    """Of one replica."""
    return config.num_gpus if config.num_gpus is not None else float(bool(_cluster_gpus()))


def _devices(config: ServeConfig) -> int:
    """One replica a GPU, or one where there is none or the replicas use none."""
    return max(1, int(_cluster_gpus())) if config.num_gpus in (None, 1) else 1


def _cluster_gpus() -> float:
    import ray

    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"engine.dtype": x}` as `{"engine": {"dtype": x}}`."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *rooms, last = str(name).split(".")
        place = found
        for room in rooms:
            place = place.setdefault(room, {})
            if not isinstance(place, dict):
                raise ConfigError(describe(str(name), value, f"stands beside {room} itself", "Say one of the two"))
        if isinstance(value, Mapping):
            value = _nested(value)
            if isinstance(place.get(last), dict):
                value = {**place[last], **value}
        place[last] = value
    return found
