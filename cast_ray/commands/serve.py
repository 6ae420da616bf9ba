"""`cast-ray serve`: the OpenAI-compatible API. Options only: `ServeConfig` says what they mean, `serve` does it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cast_ray.commands import EXIT_INTERRUPTED
from cast_ray.commands.options import option
from cast_ray.config import EngineConfig, ServeConfig
from cast_ray.settings import load_settings


def serve(
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    model: Annotated[str | None, option(ServeConfig, "model")] = None,
    host: Annotated[str | None, option(ServeConfig, "host")] = None,
    port: Annotated[int | None, option(ServeConfig, "port")] = None,
    replicas: Annotated[int | None, option(ServeConfig, "replicas")] = None,
    max_replicas: Annotated[int | None, option(ServeConfig, "max_replicas")] = None,
    keys_file: Annotated[Path | None, option(ServeConfig, "keys_file")] = None,
    width: Annotated[str | None, option(EngineConfig, "width")] = None,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    max_batch_size: Annotated[int | None, option(EngineConfig, "max_batch_size")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags win over it.")] = None,
    new_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print a new API key and its line for the keys file, and end.")
    ] = None,
) -> None:
    """Serve a model at an OpenAI-compatible API, until interrupted.

    Clients of the OpenAI API work unchanged with base_url http://HOST:PORT/v1; a live page is at http://HOST:PORT.
    Uses the Ray cluster in RAY_ADDRESS, else a local one of its own.
    Interrupted (SIGINT or SIGTERM) it finishes what is aboard and exits with 0; interrupted again it ends at once.

    Examples:

      cast-ray serve

      cast-ray serve --target Qwen/Qwen3-0.6B --model qwen --port 9000

      cast-ray serve --new-key alice >> notes.txt

      cast-ray serve --config serve.yaml --host 0.0.0.0 --keys-file keys.yaml
    """
    if new_key is not None:
        from cast_ray.serve.keys import new_key as make_key

        key, digest = make_key()
        print(f"key for {new_key}, shown once: {key}\nfor the keys file:\n  - name: {new_key}\n    sha256: {digest}")
        return
    overrides = {
        "model": model,
        "host": host,
        "port": port,
        "replicas": replicas,
        "max_replicas": max_replicas,
        "keys_file": keys_file,
        "engine": {
            "target": target,
            "drafter": drafter,
            "width": width,
            "dtype": dtype,
            "max_batch_size": max_batch_size,
        },
    }
    settings = load_settings(ServeConfig, config, overrides)

    from cast_ray.serve.driver import run_server  # Ray: not for --help

    try:
        run_server(settings)
    except KeyboardInterrupt:  # before there was anything to end in order
        print("stopped before it was up", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
