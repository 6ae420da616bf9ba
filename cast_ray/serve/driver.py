"""Start Serve with an application, say how far it is and where, and end both in order. For `cast-ray serve`."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from cast_ray.config import LOOPBACK, ServeConfig
from cast_ray.errors import EngineError, describe
from cast_ray.pool.cluster import ray_cluster
from cast_ray.pool.dispatch import short_cause
from cast_ray.serve.replica import EngineFactory, default_engine
from cast_ray.serve.summary import starting, summary

# How often a start is looked at, and then the application: each look takes time from processors that may decode.
CHECK_S, WATCH_S = 0.5, 5.0
# A start that says nothing for so long says that it goes on.
SILENCE_S = 15.0
# Beyond `drain_s`: for Serve to notice that a replica is done.
END_S = 30.0

# Of a cluster of our own: Serve's controller looks at everything ten times a second, which on a small machine slows
# decoding down by some per cent.
OWN_CLUSTER = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5"}

Say = Callable[[str], None]


def run_server(config: ServeConfig, factory: EngineFactory = default_engine, console: Console | None = None) -> None:
    """Serve until SIGINT or SIGTERM; requests aboard are then finished, for at most `drain_s`.

    Raises the engine's own error where it cannot start (a missing model, a bad drafter), EngineError when no replica
    comes up within `startup_timeout_s`, or when the application fails.
    """
    console = console or Console(stderr=True)
    stopping = threading.Event()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say("starting Ray" if not os.environ.get("RAY_ADDRESS") else f"joining Ray at {os.environ['RAY_ADDRESS']}")
    os.environ.update({name: value for name, value in OWN_CLUSTER.items() if name not in os.environ})
    # In this order: Ray sets a handler of its own for SIGTERM, which would end the process at once.
    with ray_cluster(), _signals(stopping):
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        location = "HeadOnly" if config.host in LOOPBACK else "EveryNode"
        serve.start(proxy_location=location, http_options={"host": config.host, "port": config.port})
        try:
            engines = _deploy(config, factory, stopping, say)
            if not stopping.is_set():
                say(summary(config, engines))
            while not stopping.wait(WATCH_S):
                about = serve.status().applications.get(config.app)
                if about is None or about.status == ApplicationStatus.DEPLOY_FAILED:
                    raise EngineError(f"application {config.app!r} has ended. See the logs of Serve.")
            say("stopping: requests aboard are finished first. Interrupt again to end at once")
        finally:
            _end(config)
    say("stopped")


def _deploy(config: ServeConfig, factory: EngineFactory, stopping: threading.Event, say: Say) -> list[dict[str, Any]]:
    """Wait for the application to be up; what its engines say of themselves. In a thread: Serve waits for ever where
    there is no room for a replica."""
    from ray import serve

    from cast_ray.serve.app import application
    from cast_ray.serve.starting import Listener

    failure: list[Exception] = []
    listener = Listener(config.app)
    say(starting(config))

    def run() -> None:
        try:
            serve.run(application(config, factory), name=config.app)
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="cast-ray-deploy", daemon=True)
    thread.start()
    began = spoke = time.monotonic()
    waiting = True
    while waiting and not stopping.is_set():
        thread.join(CHECK_S)
        waiting, now = thread.is_alive(), time.monotonic()
        for replica, line in listener.news():
            say(f"replica {replica}: {line}")
            spoke = now
        if now - spoke > SILENCE_S:
            say(f"not ready yet, after {now - began:.0f} s")
            spoke = now
        if now > began + config.startup_timeout_s:
            problem = "no engine was ready in that time"
            remedy = "Look at `ray status` for missing resources, or raise it"
            raise EngineError(describe("startup_timeout_s", config.startup_timeout_s, problem, remedy))
    if failure and not stopping.is_set():
        raise EngineError(f"the application did not start: {short_cause(failure[0])}")
    return list(listener.engines.values())


def _end(config: ServeConfig) -> None:
    """Take the application down: no new requests, and those aboard are finished. Serve itself ends with a cluster of
    our own. `serve.shutdown` would make Ray print that the controller, which ends itself, had died."""
    from ray import serve

    until = time.monotonic() + config.drain_s + END_S
    while True:
        try:
            serve.delete(config.app)  # waits for a minute at most
            return
        except TimeoutError:
            if time.monotonic() > until:
                return


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
