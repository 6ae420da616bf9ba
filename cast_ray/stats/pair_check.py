"""Diagnoses a drafter and target before a job: how much is accepted, and whether another reading of it does better.

Each variation is a copy of the drafter's config with one thing changed, decoded on the same prompts. Nothing is mended
here: the verdict says what to change.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cast_ray.config import EngineConfig
from cast_ray.drafters.checkpoint import EMBEDDED, find_drafter, read_config
from cast_ray.drafters.lookup import split_name
from cast_ray.drafters.pair import RECORD
from cast_ray.engine.engine import Engine
from cast_ray.engine.health import CAUSES, CHANCE, KEPT
from cast_ray.errors import ConfigError, DrafterError, describe
from cast_ray.request import Prompt, SamplingParams
from cast_ray.stats.acceptance import Acceptance, chain_acceptance, target_of
from cast_ray.stats.positions import ShiftGain, compare_shifts
from cast_ray.stats.signature import SAME, SIGNATURE, Signature, read_signature

# Other mask tokens that are tried, the tokenizer's own special ones first.
MASK_TOKENS = 3
# A variation is better where it gains this many standard errors of the difference.
CERTAIN = 2.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variation:
    """The drafter read otherwise. change: values of its dflash_config."""

    name: str
    change: dict[str, Any]


@dataclass(frozen=True)
class PairReport:
    """What was found. said: the warnings at load; tried: every variation that could be decoded, the drafter first;
    shifts: the drafter with the positions of its context shifted. off: by what share of the mass its guesses are
    others than those on the text of its record, None without one."""

    said: list[str]
    tried: list[tuple[Variation, Acceptance]]
    shifts: list[ShiftGain]
    off: float | None = None

    @property
    def own(self) -> Acceptance:
        """The drafter as it is."""
        return self.tried[0][1]

    def better(self) -> tuple[Variation, Acceptance] | None:
        """The variation that is accepted more, beyond chance, if any."""
        best = max(self.tried[1:], key=lambda item: item[1].round_length, default=None)
        if best is None:
            return None
        gain = best[1].round_length - self.own.round_length
        error = (best[1].error ** 2 + self.own.error**2) ** 0.5
        return best if gain > max(CERTAIN * error, CHANCE) else None

    def verdict(self) -> list[str]:
        """What is likely wrong, or that nothing is, in sentences."""
        own, better = self.own, self.better()
        accepted, promised = own.round_length - 1, own.promised - 1
        found = []
        if better is not None:
            found.append(
                f"With {better[0].name} {better[1].round_length:.2f} instead of {own.round_length:.2f} tokens a round "
                f"are committed: set {json.dumps(better[0].change)} in its config.json."
            )
        if (shift := max(self.shifts, key=lambda one: one.shifted, default=None)) is not None and shift.better:
            found.append(
                f"With the positions of its context {shift.shift:+d} it puts {shift.shifted:.3f} instead of "
                f"{shift.own:.3f} on the tokens that follow: it was trained with other positions. Retrain it."
            )
        if self.off is not None and self.off > SAME:
            found.append(
                f"On the text of its record its guesses are {self.off:.0%} off those that were recorded: it reads "
                "other features, or other positions of its context, than where it was measured."
            )
        if accepted <= CHANCE:
            found.append(f"Hardly a token is accepted. Likely: {'; '.join(CAUSES)}.")
        elif accepted < KEPT * promised:
            found.append(
                f"It keeps {accepted / promised:.0%} of what it promises: it is sure of itself and wrong. Likely: "
                f"{'; '.join(CAUSES)}."
            )
        if not found:
            kept = f"{accepted / promised:.0%}" if promised > 0 else "all"
            found.append(f"The pair works: {own.round_length:.2f} tokens a round, {kept} of what it promises.")
        return found + self.said


def variations(config: EngineConfig, tokenizer: Any, layers: int) -> list[Variation]:
    """The drafter as it is, then other layers and mask tokens that exist for this target."""
    drafter = read_config(find_drafter(named_drafter(config)))
    tried = [Variation("the drafter as it is", {})]
    for step in (-1, 1):
        taps = [tap + step for tap in drafter.taps]
        if min(taps) >= 0 and max(taps) < layers:
            tried.append(Variation(f"layers {step:+d}", {"target_layer_ids": taps}))
    special = [getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk", "eos", "bos")]
    others = dict.fromkeys(token for token in special if token is not None and token != drafter.mask_token_id)
    tried += [Variation(f"mask token {token}", {"mask_token_id": token}) for token in list(others)[:MASK_TOKENS]]
    return tried


def check_pair_by_decoding(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    max_tokens: int,
    report: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> PairReport:
    """Decode the prompts with each variation. Raises DrafterError or ModelError where the pair cannot be loaded."""
    folder = find_drafter(named_drafter(config))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    settings = config.replace(drafter=named_drafter(config), width="chain", prefix_cache=False)
    with _warnings() as said:
        engine = _start(settings, folder, said)
    layers = target_of(engine).loaded.model.config.get_text_config().num_hidden_layers
    todo = variations(config, engine.tokenizer, layers)
    tried = []
    for number, variation in enumerate(todo):
        report(variation.name, number, len(todo) + 1)
        with _changed(folder, variation.change) as changed, _warnings():
            tried_on = Engine(settings.replace(drafter=str(changed))) if variation.change else engine
            # Without the engine's watch over its drafter, which would stop a bad one.
            tried_on.use_policy(tried_on.policy)
            tried.append((variation, chain_acceptance(tried_on, prompts, params)))
    report("positions", len(todo), len(todo) + 1)
    return PairReport(said, tried, compare_shifts(engine, folder, prompts, params), _off_record(engine, folder))


def _off_record(engine: Engine, folder: Path) -> float | None:
    record = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(RECORD)
    recorded = Signature.from_dict(record.get(SIGNATURE)) if isinstance(record, dict) else None
    return None if recorded is None else recorded.off(read_signature(engine, recorded.prompt))


def _start(settings: EngineConfig, folder: Path, said: list[str]) -> Engine:
    """The pair as it is. A record that its own config contradicts is said, and diagnosed all the same."""
    try:
        return Engine(settings)
    except DrafterError as error:
        if RECORD not in str(error):
            raise
        said.append(str(error))
        with _changed(folder, {}) as copy:
            return Engine(settings.replace(drafter=str(copy)))


def named_drafter(config: EngineConfig) -> str:
    """The block drafter that a setting names; ConfigError where it names none."""
    name, _ = split_name(config.drafter)
    if name == "auto":
        name = EMBEDDED if config.target == EMBEDDED else "none"
    if name is None or name == "none":
        raise ConfigError(describe("drafter", config.drafter, "names no drafter to check", "Give one with --drafter"))
    return name


@contextmanager
def _changed(folder: Path, change: dict[str, Any]) -> Iterator[Path]:
    """The drafter's folder with other values, and without the record that would object to them."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for file in folder.iterdir():
            if file.name != "config.json":
                (copy / file.name).symlink_to(file.resolve())
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        raw.pop(RECORD, None)
        raw.setdefault("dflash_config", {}).update(change)
        (copy / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        yield copy


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the loading of a pair warns of, kept rather than printed."""
    kept: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    source, handler = logging.getLogger("cast_ray.drafters.pair"), Keep()
    propagate, source.propagate = source.propagate, False
    source.addHandler(handler)
    try:
        yield kept
    finally:
        source.removeHandler(handler)
        source.propagate = propagate
