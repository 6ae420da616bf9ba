"""Checks on a user's own models that what an engine decodes is the target's own output, whatever the width and batch.

Two references: Hugging Face's `generate`, greedy, and the engine itself decoding plainly, one request at a time, greedy
and sampled. What is found is counted, not mended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cast_ray.config import EngineConfig
from cast_ray.drafters.checkpoint import EMBEDDED
from cast_ray.drafters.lookup import MAX_DEPTH, split_name
from cast_ray.engine.engine import Engine
from cast_ray.engine.setup import policy_table
from cast_ray.models.devices import resolve_dtype
from cast_ray.models.loading import LoadedTarget, load_target
from cast_ray.request import Prompt, SamplingParams, derive_seed
from cast_ray.stats.acceptance import drafter_of, target_of
from cast_ray.stats.comparison import Comparison, reference_greedy
from cast_ray.width.latency import LatencyTable
from cast_ray.width.policy import make_policy, needs_latency

PLAIN = "ar"
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Mode:
    """How requests choose tokens: greedy, or sampled with seeds made from `seed`."""

    temperature: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        return f"T={self.temperature:g} seed {self.seed}" if self.temperature else "greedy"

    def params(self, count: int, max_tokens: int) -> list[SamplingParams]:
        """Of `count` requests, each with a seed of its own."""
        seeds = [derive_seed(self.seed, i) if self.temperature else None for i in range(count)]
        return [SamplingParams(max_tokens=max_tokens, temperature=self.temperature, seed=seed) for seed in seeds]


@dataclass
class Checked:
    """One way of decoding against its reference. batch: requests decoded together."""

    width: str
    batch: int
    mode: Mode
    against: str
    comparison: Comparison = field(default_factory=Comparison)


@dataclass(frozen=True)
class CheckReport:
    """All ways that were tried. dtype: what the target computed in, such as `float32`."""

    dtype: str
    checked: list[Checked]

    @property
    def holds(self) -> bool:
        """Whether every output is the target's own."""
        return all(item.comparison.holds for item in self.checked)

    def verdict(self) -> str:
        """What was found, in a sentence or two."""
        tokens = sum(item.comparison.tokens for item in self.checked)
        ties = sum(item.comparison.ties for item in self.checked)
        if self.holds:
            found = f"The output is the target's own: {tokens} tokens compared in {self.dtype}, {ties} near-ties."
            more = "" if self.dtype == "float32" else " In 16 bits a batch rounds otherwise than a request alone."
            return found + more
        failed = [item for item in self.checked if not item.comparison.holds]
        first = failed[0]
        why = first.comparison.differences[0] if first.comparison.differences else "more near-ties than chance has"
        return (
            f"The output is NOT the target's own in {len(failed)} of {len(self.checked)} ways. "
            f"First: {first.width}, batch {first.batch}, {first.mode}, against {first.against}: {why}."
        )


def check(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    widths: Sequence[str],
    batches: Sequence[int],
    temperature: float,
    seeds: Sequence[int],
    report: Report = lambda name, done, total: None,
) -> CheckReport:
    """Decode the prompts in every way, and compare. Loads the target twice: for the engine, and for its reference.

    widths: spellings of policies; without a drafter only `ar` is tried, and of a target with a recurrent state only the
    chain beside it. Raises ConfigError, ModelError or DrafterError.
    """
    wanted = [*widths] if _has_drafter(config) else []
    start = next((width for width in wanted if needs_latency(width)), wanted[0] if wanted else PLAIN)
    settings = config.replace(max_batch_size=max(batches), prefix_cache=False, width=start, watch_drafter=False)
    report("loading", 0, 0)
    engine = Engine(settings)
    plain = _plain_model(settings, engine)
    rendered: list[Prompt] = [engine.render(prompt) for prompt in prompts]
    if target_of(engine).states is not None:  # it takes no trees, whatever its settings ask for
        wanted = ["chain"] if wanted else []
    tried = dict.fromkeys([PLAIN, *wanted])
    modes = [Mode(), *(Mode(temperature, seed) for seed in seeds)]
    pairs = [(width, batch) for width in tried for batch in batches if (width, batch) != (PLAIN, 1)]
    ways = [(width, batch, mode) for width, batch in pairs for mode in modes]
    references: dict[Mode, list[list[int]]] = {}
    checked = []
    for number, mode in enumerate(modes):
        report(f"{PLAIN}, alone, {mode}", number, len(modes) + len(ways))
        references[mode] = _decode(engine, PLAIN, rendered, mode.params(len(rendered), max_tokens), 1)
    own = Checked(PLAIN, 1, Mode(), "generate")
    for prompt, ours in zip(rendered, references[Mode()], strict=True):
        tokens = _ids(prompt)
        reference = reference_greedy(plain.model, tokens, len(ours), plain.eos_token_ids)
        own.comparison.add(plain.model, tokens, ours, reference)
    checked.append(own)
    for number, (width, batch, mode) in enumerate(ways, start=len(modes)):
        report(f"{width}, batch {batch}, {mode}", number, len(modes) + len(ways))
        params = mode.params(len(rendered), max_tokens)
        item = Checked(width, batch, mode, f"{PLAIN}, alone")
        outputs = _decode(engine, width, rendered, params, batch)
        for prompt, ours, reference, own_params in zip(rendered, outputs, references[mode], params, strict=True):
            seed = own_params.seed or 0
            item.comparison.add(plain.model, _ids(prompt), ours, reference, mode.temperature, seed)
        checked.append(item)
    engine.check_integrity()
    return CheckReport(str(target_of(engine).dtype).removeprefix("torch."), checked)


def _has_drafter(config: EngineConfig) -> bool:
    name, looking_up = split_name(config.drafter)
    return looking_up or (name not in (None, "none") and (name != "auto" or config.target == EMBEDDED))


def _plain_model(config: EngineConfig, engine: Engine) -> LoadedTarget:
    """The target as Hugging Face runs it, with the engine's weights and precision."""
    dtype = resolve_dtype(config.dtype, engine.device)
    loaded = load_target(config.target, dtype, engine.device, trust_remote_code=config.trust_remote_code)
    if loaded.model.dtype != target_of(engine).dtype:  # quantised layers do not change theirs
        loaded.model.to(target_of(engine).dtype)
    return loaded


def _decode(
    engine: Engine, width: str, prompts: list[Prompt], params: list[SamplingParams], batch: int
) -> list[list[int]]:
    """Outputs with `batch` requests at a time."""
    drafter, latency = drafter_of(engine), engine.stats()["latency"]
    looking_up = MAX_DEPTH + 1 if engine.stats()["lookup"] else None
    policy = make_policy(
        width,
        block_size=drafter.block_size if drafter is not None else looking_up,
        max_nodes=engine.config.max_nodes,
        latency=policy_table(LatencyTable.from_dict(latency) if latency else None),
    )
    engine.use_policy(policy)
    outputs: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        outputs += [out.token_ids for out in engine.generate(prompts[part], params[part])]
    return outputs


def _ids(prompt: Prompt) -> list[int]:
    assert isinstance(prompt, list)
    return [token for token in prompt if isinstance(token, int)]
