"""A live Serve application around a tiny model, for tests of the API and of its page."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import yaml
from transformers import AutoTokenizer

from cast_ray.config import EngineConfig
from cast_ray.engine.engine import Engine
from cast_ray.serve.backend import ABOUT_FRESH_S
from cast_ray.serve.keys import new_key
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

SHAPE = qwen3(vocab_size=64)
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{% if tools %}t9 {% endif %}t1"
# A slow machine that does other things too must not fail a test: what is waited for comes, or never does.
PATIENCE_S = 240.0
LONG = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}
KEYS: Mapping[str, Mapping[str, int]] = {"free": {}, "slow": {"requests_per_minute": 2}, "single": {"concurrency": 1}}


@dataclass
class Server:
    """A running application, its keys, the engine to compare with, and the folder of the cluster's logs."""

    url: str
    keys: dict[str, str]
    engine: Engine
    logs: Path

    def client(self, key: str = "free") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.keys.get(key, key), max_retries=0, timeout=PATIENCE_S
        )

    def http(self, key: str | None = "free") -> httpx.Client:
        headers = {"authorization": f"Bearer {self.keys.get(key, key)}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def replicas(self) -> list[dict[str, Any]]:
        """Those that answered in time: on a busy machine one may be missing."""
        with self.http() as http:
            return http.get("/status").json()["replicas"]


@contextmanager
def running_server(folder: Path, **changes: Any) -> Iterator[Server]:
    """Serve on a cluster of its own. changes: of `ServeConfig`; those of `engine` go beside the tiny model's."""
    import ray
    from ray import serve

    from cast_ray.serve.app import build_app

    target = save_tiny_model(folder / "target", SHAPE, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    drafter = save_tiny_drafter(folder / "drafter", target=SHAPE)
    engine: dict[str, Any] = {
        "target": str(target),
        "drafter": str(drafter),
        "width": "fixed:4",
        "watch_drafter": False,  # it is random; what it drafts is verified all the same
        "dtype": "float32",
        "threads": 1,
        "max_batch_size": 4,
        "max_context": 480,
        "max_waiting": 8,
        "kv_cache_tokens": 4096,
        **changes.pop("engine", {}),
    }
    keys, entries = {}, []
    for name, limits in KEYS.items():
        keys[name], digest = new_key()
        entries.append({"name": name, "sha256": digest, **limits})
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
    replicas = changes.setdefault("replicas", 2)
    given = {
        "engine": engine,
        "model": "tiny",
        "keys_file": str(folder / "keys.yaml"),
        "storage": str(folder / "storage"),
        "drain_s": 5,
        **changes,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.shutdown()
    context = ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        logs = Path(context.address_info["session_dir"]) / "logs"
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # of this process; the others' is what is tested
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(given), name="cast-ray")
        found = Server(f"http://127.0.0.1:{port}", keys, Engine(EngineConfig(**engine)), logs)
        wait_for(lambda: len(found.replicas()) == replicas)
        yield found
        serve.shutdown()
    finally:
        ray.shutdown()


def wait_for(done: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Until it has come to it; AssertionError where it does not."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "it did not come to it in time"
        time.sleep(0.25)


def freed(server: Server) -> bool:
    """Nothing aboard any replica, and every page free again."""
    time.sleep(ABOUT_FRESH_S)  # or what is told may be from before
    found = server.replicas()
    return bool(found) and all(
        not one["aboard"]
        and not one["engine"]["running"]
        and not one["engine"]["waiting"]
        and one["engine"]["kv_pages_free"] == one["engine"]["kv_pages"]
        for one in found
    )
