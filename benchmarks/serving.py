"""Open-loop load on any OpenAI-compatible URL: requests come at random moments, whether or not others are answered.

For each rate (requests a second, Poisson arrivals): time to the first token, time between tokens, tokens a second, and
goodput, the share and number a second of requests within both limits of the SLO. With --concurrency instead of --rates
that many clients ask in turn, each waiting for its answer. Arrivals and prompts follow from --seed, so that two servers
get the same load. Between tokens: from the first chunk to the last, over the tokens behind those of the first.

    cast-ray serve --width ar --port 8001        # and again with chain, and the default
    python benchmarks/serving.py --url http://127.0.0.1:8001/v1 --rates 0.5,1,2 --seconds 60 --json ar.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai

OWN = Path(__file__).parents[1] / "tests" / "data" / "prompts.jsonl"


@dataclass
class Sent:
    """One request: seconds since the load began, and what came of it. gap_s: mean between tokens."""

    due: float
    status: str = "open"
    first_s: float | None = None
    total_s: float | None = None
    gap_s: float | None = None
    tokens: int = 0
    rounds: int = 0


@dataclass
class Load:
    """What to send. slo: most seconds to the first token, and most between tokens."""

    client: openai.AsyncOpenAI
    model: str
    prompts: list[str]
    max_tokens: int
    temperature: float
    slo: tuple[float, float]
    sent: list[Sent] = field(default_factory=list)

    async def ask(self, number: int, one: Sent) -> None:
        """One streamed chat, timed from when it was due: a client that is late counts its own delay too."""
        prompt = self.prompts[number % len(self.prompts)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        chunks, last = 0, began
        try:
            stream = await self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=number,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if chunk.choices and (chunk.choices[0].delta.content or chunk.choices[0].finish_reason):
                    last = loop.time()
                    chunks += 1
                    one.first_s = one.first_s if one.first_s is not None else last - began
                if chunk.usage is not None:
                    one.tokens = chunk.usage.completion_tokens
                    one.rounds = (getattr(chunk.usage, "speculation", None) or {}).get("rounds", 0)
            one.total_s = last - began
            if one.tokens > 1 and chunks > 1 and one.first_s is not None:
                one.gap_s = (one.total_s - one.first_s) / (one.tokens - 1)
            one.status = "ok"
        except openai.APIStatusError as error:
            one.status = str(error.status_code)
        except openai.OpenAIError as error:
            one.status = type(error).__name__

    def good(self, one: Sent) -> bool:
        """Whether it was answered within the SLO."""
        if one.status != "ok" or one.first_s is None:
            return False
        return one.first_s <= self.slo[0] and (one.gap_s or 0.0) <= self.slo[1]


async def at_rate(load: Load, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Poisson arrivals for `seconds`, then wait for what is open."""
    draw = random.Random(seed)
    began = time.monotonic()
    due, tasks = 0.0, []
    while (due := due + draw.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        one = Sent(due)
        load.sent.append(one)
        tasks.append(asyncio.create_task(load.ask(len(tasks), one)))
    await asyncio.gather(*tasks)
    return {"rate": rate, **summary(load, time.monotonic() - began)}


async def at_concurrency(load: Load, clients: int, seconds: float) -> dict[str, Any]:
    """So many clients, each with one request at a time, for `seconds`."""
    began = time.monotonic()

    async def client() -> None:
        while time.monotonic() - began < seconds:
            one = Sent(time.monotonic() - began)
            load.sent.append(one)
            await load.ask(len(load.sent) - 1, one)

    await asyncio.gather(*(client() for _ in range(clients)))
    return {"concurrency": clients, **summary(load, time.monotonic() - began)}


def summary(load: Load, wall_s: float) -> dict[str, Any]:
    """Numbers of one load; times in milliseconds."""
    done = [one for one in load.sent if one.status == "ok"]
    statuses: dict[str, int] = {}
    for one in load.sent:
        statuses[one.status] = statuses.get(one.status, 0) + 1
    tokens, rounds = sum(one.tokens for one in done), sum(one.rounds for one in done)
    good = sum(map(load.good, load.sent))
    return {
        "requests": len(load.sent),
        "statuses": statuses,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "round_length": tokens / rounds if rounds else None,
        "first_token_ms": percentiles([one.first_s for one in done]),
        "between_tokens_ms": percentiles([one.gap_s for one in done]),
        "request_ms": percentiles([one.total_s for one in done]),
        "goodput_share": good / len(load.sent) if load.sent else None,
        "goodput_per_s": good / wall_s,
    }


def percentiles(seconds: list[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds."""
    known = [value * 1000 for value in seconds if value is not None]
    if not known:
        return None
    return dict(zip(("p50", "p90", "p99"), np.percentile(known, (50, 90, 99)).round(1).tolist(), strict=True))


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    load = f"{row['rate']:g}/s" if "rate" in row else f"{row['concurrency']} clients"

    def times(name: str) -> str:
        found = row[name]
        return f"{found['p50']:.0f}/{found['p90']:.0f}/{found['p99']:.0f}" if found else "-"

    length = f"{row['round_length']:.2f}" if row["round_length"] else "-"
    share = f"{row['goodput_share']:.0%}" if row["goodput_share"] is not None else "-"
    return (
        f"| {load} | {row['requests']} | {row['tokens_per_s']:.1f} | {length} | {times('first_token_ms')} | "
        f"{times('between_tokens_ms')} | {share} | {row['goodput_per_s']:.2f} | {row['statuses']} |"
    )


async def main(arguments: argparse.Namespace) -> None:
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [row.get("prompt") or row["messages"][-1]["content"] for row in map(json.loads, lines)]
    random.Random(arguments.seed).shuffle(prompts)
    key = os.environ.get("OPENAI_API_KEY", "none")
    client = openai.AsyncOpenAI(base_url=arguments.url, api_key=key, max_retries=0, timeout=arguments.timeout)
    model = arguments.model or (await client.models.list()).data[0].id
    slo = (arguments.slo_first_ms / 1000, arguments.slo_token_ms / 1000)

    def load() -> Load:
        return Load(client, model, prompts, arguments.max_tokens, arguments.temperature, slo)

    warm = load()
    await asyncio.gather(*(warm.ask(number, Sent(0.0)) for number in range(arguments.warm_up)))
    print(f"{arguments.url}, {model}; SLO {arguments.slo_first_ms:g} ms and {arguments.slo_token_ms:g} ms a token\n")
    print("| load | requests | tokens/s | round | first token ms | between tokens ms | good | good/s | status |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    rows = []
    for number, value in enumerate(arguments.concurrency or arguments.rates):
        one = load()
        if arguments.concurrency:
            rows.append(await at_concurrency(one, int(value), arguments.seconds))
        else:
            rows.append(await at_rate(one, value, arguments.seconds, arguments.seed + number))
        rows[-1]["sent"] = [asdict(sent) for sent in one.sent]
        print(show(rows[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"settings": vars(arguments), "loads": rows}, indent=1))


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--prompts", default=str(OWN), help="JSONL with prompt or messages")
    parser.add_argument("--rates", type=numbers, default=[0.25, 0.5, 1.0], help="requests a second")
    parser.add_argument("--concurrency", type=numbers, help="clients, instead of rates")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=2, help="requests before the first load")
    parser.add_argument("--slo-first-ms", type=float, default=2000)
    parser.add_argument("--slo-token-ms", type=float, default=200)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", help="write everything here, every request included")
    asyncio.run(main(parser.parse_args()))
