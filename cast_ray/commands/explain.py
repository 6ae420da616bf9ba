"""`cast-ray explain PROMPT`: one decoding round, taken apart. `stats.explain` watches, `stats.explain_view` draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cast_ray.commands.options import option
from cast_ray.config import EngineConfig
from cast_ray.settings import load_settings


def explain(
    prompt: Annotated[str, typer.Argument(help="What to decode: a user's message, or with --raw plain text.")],
    round: Annotated[int, typer.Option(min=1, help="Which of the rounds that had candidates.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens to decode.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a sampled request.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Text as it is, without the chat template.")] = False,
    shown: Annotated[int, typer.Option(min=1, help="Nodes of the tree to draw.")] = 31,
    width: Annotated[str | None, option(EngineConfig, "width")] = None,
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    device: Annotated[str | None, option(EngineConfig, "device")] = None,
    threads: Annotated[int | None, option(EngineConfig, "threads")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of engine settings; flags win over it.")] = None,
) -> None:
    """Show one round: the tree with its masses, what was committed, what the chain would have, and why this width.

    With lookup beside a drafter every node says where it comes from: the drafter, the prompt, the output, or both.

    Examples:

      cast-ray explain "What is the capital of France?"

      cast-ray explain "def fibonacci(n):" --raw --round 5 --width fixed:15

      cast-ray explain "Say this again: the cat sat on the mat." --drafter embedded+lookup --round 4
    """
    said = {"width": width, "target": target, "drafter": drafter, "dtype": dtype, "device": device, "threads": threads}
    settings = load_settings(EngineConfig, config, said)

    from rich.console import Console

    from cast_ray.engine.engine import Engine  # these load torch, which --help need not
    from cast_ray.request import Prompt, SamplingParams
    from cast_ray.stats.explain import explain_round
    from cast_ray.stats.explain_view import render

    engine = Engine(settings.replace(max_batch_size=1))
    chat = not raw and bool(engine.tokenizer.chat_template)
    asked: Prompt = [{"role": "user", "content": prompt}] if chat else prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    explained = explain_round(engine, asked, params, round)
    Console().print(render(explained, lambda tokens: str(engine.tokenizer.decode(list(tokens))), shown))
