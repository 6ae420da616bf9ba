"""Start Serve with an application, say where it is, and end both in order. For `cast-ray serve`."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from cast_ray.config import LOOPBACK, ServeConfig
from cast_ray.errors import EngineError, describe
from cast_ray.pool.cluster import ray_cluster
from cast_ray.pool.dispatch import short_cause
from cast_ray.serve.replica import EngineFactory, default_engine

CHECK_S = 0.5


def run_server(config: ServeConfig, factory: EngineFactory = default_engine, console: Console | None = None) -> None:
    """Serve until SIGINT or SIGTERM; requests aboard are then finished, for at most `drain_s`.

    Raises EngineError when no replica comes up within `startup_timeout_s`, or when the application fails.
    """
    console = console or Console(stderr=True)
    stopping = threading.Event()
    # In this order: Ray sets a handler of its own for SIGTERM, which would end the process at once.
    with _cluster(), _signals(stopping):
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        console.print(f"starting {config.model_name} ({config.engine.target})", highlight=False, soft_wrap=True)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        location = "HeadOnly" if config.host in LOOPBACK else "EveryNode"
        serve.start(proxy_location=location, http_options={"host": config.host, "port": config.port})
        try:
            _deploy(config, factory, stopping)
            if not stopping.is_set():
                where = f"http://{config.host}:{config.port}"
                console.print(f"API at {where}/v1, page at {where}/", highlight=False, soft_wrap=True)
            while not stopping.wait(CHECK_S):
                about = serve.status().applications.get(config.app)
                if about is None or about.status == ApplicationStatus.DEPLOY_FAILED:
                    raise EngineError(f"application {config.app!r} has ended. See the logs of Serve.")
            console.print("finishing what is aboard", highlight=False)
        finally:
            serve.delete(config.app)


def _deploy(config: ServeConfig, factory: EngineFactory, stopping: threading.Event) -> None:
    """Wait for the application to be up. In a thread: Serve waits for ever where there is no room for a replica."""
    from ray import serve

    from cast_ray.serve.app import application

    failure: list[Exception] = []

    def run() -> None:
        try:
            serve.run(application(config, factory), name=config.app)
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="cast-ray-deploy", daemon=True)
    thread.start()
    until = time.monotonic() + config.startup_timeout_s
    while thread.is_alive() and not stopping.is_set():
        thread.join(CHECK_S)
        if time.monotonic() > until:
            problem = "no engine was ready in that time"
            remedy = "Look at `ray status` for missing resources, or raise it"
            raise EngineError(describe("startup_timeout_s", config.startup_timeout_s, problem, remedy))
    if failure:
        raise EngineError(f"the application did not start: {short_cause(failure[0])}")


@contextmanager
def _cluster() -> Iterator[None]:
    """A connection to a cluster; on one of our own, what Serve has started is ended before it."""
    import ray

    own = not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")
    with ray_cluster():
        try:
            yield
        finally:
            if own:
                from ray import serve

                serve.shutdown()


@contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    """Both signals ask for an orderly end; a second one is the shell's business."""

    def stop(number: int, _: Any) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
