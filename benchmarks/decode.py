"""Milliseconds a token of every decoding method, side by side in one run: batch 1, greedy, the same prompts for all.

Methods take turns prompt by prompt, so that a machine that slows down slows all of them. Times are whole calls, prefill
included. Hugging Face `generate` is plain decoding; `dflash` is the PyPI package's own loop with the same drafter.

    python benchmarks/decode.py --prompts DIR --count 10 --max-tokens 64 --json out.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.calibration.profile import device_name
from cast_ray.drafters.checkpoint import find_drafter
from cast_ray.models.loading import load_target

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "prompts"
OWN = ROOT / "tests" / "data" / "prompts.jsonl"
DOMAINS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
POLICIES = ("ar", "chain", "fixed:3", "fixed:7", "fixed:15", "fixed:31", "fixed:63", "deployment")

Method = Callable[[list[int]], tuple[int, int]]  # prompt -> tokens made, rounds


@dataclass
class Sums:
    """What one method did on one domain."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, rounds: int, seconds: float) -> None:
        self.tokens += tokens
        self.rounds += rounds
        self.seconds += seconds


@dataclass
class Results:
    """By method, by domain."""

    sums: dict[str, dict[str, Sums]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Sums)))

    def total(self, method: str) -> Sums:
        whole = Sums()
        for part in self.sums[method].values():
            whole.add(part.tokens, part.rounds, part.seconds)
        return whole

    def ms(self, method: str, domain: str | None = None) -> float:
        sums = self.total(method) if domain is None else self.sums[method][domain]
        return 1000 * sums.seconds / sums.tokens


def read_prompts(folder: Path | None, count: int) -> dict[str, list[list[dict[str, str]]]]:
    """Chats by domain, the first `count` of each."""
    if folder is None and not SHARED.is_dir():
        rows = [json.loads(line) for line in OWN.read_text(encoding="utf-8").splitlines()]
    else:
        files = [(folder or SHARED) / f"{domain}.jsonl" for domain in DOMAINS]
        rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    by_domain: dict[str, list[list[dict[str, str]]]] = defaultdict(list)
    for row in rows:
        if len(by_domain[row["domain"]]) < count:
            by_domain[row["domain"]].append(row["messages"])
    return by_domain


def peers(target: str, drafter: str, dtype: torch.dtype, max_tokens: int) -> dict[str, Method]:
    """Hugging Face `generate`, and the public package's loop where it is installed."""
    loaded = load_target(target, dtype, torch.device("cpu" if not torch.cuda.is_available() else "cuda"))
    model, eos = loaded.model, list(loaded.eos_token_ids)

    def hugging_face(prompt: list[int]) -> tuple[int, int]:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=eos[0]
        )
        made = out.shape[1] - len(prompt)
        return made, made

    methods: dict[str, Method] = {"hf generate": hugging_face}
    try:
        from dflash.model import DFlashDraftModel, dflash_generate
    except ImportError:
        print("the dflash package is not installed: pip install --no-deps dflash==0.1.0")
        return methods
    public = DFlashDraftModel.from_pretrained(find_drafter(drafter), dtype=dtype).to(model.device).eval()
    rounds = [0]
    public.register_forward_hook(lambda *_: rounds.__setitem__(0, rounds[0] + 1))

    def dflash(prompt: list[int]) -> tuple[int, int]:
        rounds[0] = 0
        out = dflash_generate(public, model, torch.tensor([prompt], device=model.device), max_tokens, eos)
        return out.shape[1] - len(prompt), rounds[0]

    methods["dflash package"] = dflash
    return methods


def ours(engines: dict[str, Engine], max_tokens: int) -> dict[str, Method]:
    """Our policies, each with an engine of its own."""

    def method(engine: Engine) -> Method:
        def decode(prompt: list[int]) -> tuple[int, int]:
            out = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0]
            return len(out.token_ids), out.stats.rounds

        return decode

    return {width: method(engine) for width, engine in engines.items()}


def run(methods: dict[str, Method], prompts: dict[str, list[list[int]]], count: int, warm_up: int) -> Results:
    """Every method on every prompt, in turn; the first is another one each time. The first `warm_up` do not count."""
    results = Results()
    names = list(methods)
    turn = 0
    for number in range(count + warm_up):
        for domain, chats in prompts.items():
            if number >= len(chats):
                continue
            turn += 1
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                started = time.perf_counter()
                tokens, rounds = methods[name](chats[number])
                seconds = time.perf_counter() - started
                if number >= warm_up:
                    results.sums[name][domain].add(tokens, rounds, seconds)
        print(f"prompt {number + 1} of {count + warm_up} a domain done", flush=True)
    return results


def table(results: Results, methods: list[str], domains: list[str]) -> str:
    """Markdown: ms a token by domain and in all, round length, and the ratios."""
    head = ["method", *domains, "all, ms/token", "round length", "speedup over hf generate", "over our ar"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name in methods:
        whole = results.total(name)
        cells = [f"{results.ms(name, domain):.1f}" for domain in domains]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {results.ms(name):.1f} | {whole.tokens / whole.rounds:.2f} | "
            f"{results.ms('hf generate') / results.ms(name):.2f}x | {results.ms('ar') / results.ms(name):.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--prompts", type=Path, help="folder of DOMAIN.jsonl; default: ../shared/data/prompts, or the tests' few"
    )
    parser.add_argument("--count", type=int, default=10, help="prompts a domain")
    parser.add_argument("--warm-up", type=int, default=2, help="prompts a domain that are decoded first, not counted")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--widths", default=",".join(POLICIES), help="our policies, by commas; ar is always there")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    widths = list(dict.fromkeys(["ar", *options.widths.split(",")]))
    engines = {
        width: Engine(
            EngineConfig(
                target=options.target, drafter=options.drafter, dtype=options.dtype, width=width, max_batch_size=1
            )
        )
        for width in widths
    }
    chats = read_prompts(options.prompts, options.count + options.warm_up)
    prompts = {domain: [engines["ar"].render(chat) for chat in some] for domain, some in chats.items()}
    methods = {
        **peers(options.target, options.drafter, getattr(torch, options.dtype), options.max_tokens),
        **ours(engines, options.max_tokens),
    }
    results = run(methods, prompts, options.count, options.warm_up)
    about = {
        "device": device_name(engines["ar"].device),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompts_a_domain": options.count,
        "max_tokens": options.max_tokens,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(table(results, list(methods), list(prompts)))
    reports: dict[str, Any] = {width: engine.stats() for width, engine in engines.items()}
    if "deployment" in reports:
        print("deployment:", json.dumps(reports["deployment"]["width"]))
    if options.json:
        sums = {name: {domain: vars(part) for domain, part in parts.items()} for name, parts in results.sums.items()}
        options.json.write_text(json.dumps({"about": about, "sums": sums, "engines": reports}, indent=1))


if __name__ == "__main__":
    main()
