"""Our drafter and the released package's beside each other over several rounds, each with its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.dflash import DFlashDrafter, load_dflash
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.loading import load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

PAGE = 4
VOCAB = 64


@dataclass(frozen=True)
class OracleRound:
    """A round of two requests: ours is ready to draft, theirs has: hidden `[2, D, hidden]`, logits `[2, D, vocab]`."""

    ours: DFlashDrafter
    theirs: Any
    contexts: DraftContexts
    hidden: Tensor
    logits: Tensor


def oracle_rounds(folder: Path, changes: dict[str, Any]) -> Iterator[OracleRound]:
    """Four rounds of a random drafter whose config.json has these `changes`."""
    target_config = qwen3(vocab_size=VOCAB)
    drafter = save_tiny_drafter(folder / "drafter", target=target_config, **changes)
    loaded = load_target(
        str(save_tiny_model(folder / "target", target_config)),
        torch.float32,
        torch.device("cpu"),
        attn_implementation=ATTENTION_NAME,
    )
    config = read_config(drafter)
    target = Target(loaded, SdpaBackend(PAGE), slots=40 * PAGE, taps=config.taps)
    ours = load_dflash(drafter, config, target, 40 * PAGE, PAGE)
    theirs = _public_model(drafter, DFlash2DraftModel if config.dflash2 else DFlashDraftModel)

    # Pages in no order, and a second request in the same forward, must make no difference.
    tables = torch.randperm(40)[:24].view(2, 12)
    generator = torch.Generator().manual_seed(5)
    lengths = [7, 2]
    caches = [_make_cache(theirs.config) for _ in lengths]
    fresh = [torch.randn(n, len(config.taps) * 32, generator=generator) for n in lengths]
    seen = [0, 0]
    for accepted in ([3, 1], [1, 5], [4, 2], [1, 1]):
        expected = []
        roots = torch.randint(VOCAB, (2,), generator=generator)
        for b in range(2):
            positions = torch.arange(seen[b], lengths[b])
            slots = tables[b, positions // PAGE] * PAGE + positions % PAGE
            ours.observe(fresh[b], slots, positions)
            block = torch.full((1, config.block_size), config.mask_token_id)
            block[0, 0] = roots[b]
            hidden = theirs(
                target_hidden=fresh[b][None],
                noise_embedding=F.embedding(block, target.embedding) * config.input_scale,
                position_ids=torch.arange(seen[b], lengths[b] + config.block_size)[None],
                past_key_values=caches[b],
                use_cache=True,
            )
            _crop_to(caches[b], lengths[b])
            expected.append(hidden[0, 1:])
        contexts = DraftContexts(roots, list(lengths), torch.tensor(lengths), tables, None)
        states = torch.stack(expected)
        yield OracleRound(ours, theirs, contexts, states, theirs.compute_logits(states, target.head))
        seen = list(lengths)
        lengths = [n + more for n, more in zip(lengths, accepted, strict=True)]
        fresh = [torch.randn(more, len(config.taps) * 32, generator=generator) for more in accepted]


def _public_model(folder: Path, kind: type[DFlashDraftModel]) -> Any:
    config = Qwen3Config.from_json_file(folder / "config.json")
    config._attn_implementation = "sdpa"
    model = kind(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
