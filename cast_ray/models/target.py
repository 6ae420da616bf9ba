"""The target model over one flattened ragged batch: logits where asked, features of a few layers for the drafter.

The model is the Hugging Face module itself; only its attention is ours, by the name `cast_ray` in transformers'
attention interface. Nothing here chooses tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from cast_ray.models import native
from cast_ray.models.attention.base import Attending, AttentionBackend, Layer, Step, begin
from cast_ray.models.families import RECURRENT, layer_kinds
from cast_ray.models.kv_cache import KVCache
from cast_ray.models.loading import LoadedTarget
from cast_ray.models.recurrent import keep_states

if TYPE_CHECKING:
    from cast_ray.models.graphs import TargetGraphs
    from cast_ray.models.native.decoder import NativeDecoder

ATTENTION_NAME = "cast_ray"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attending: Attending | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query `[1, heads, T, dim]`, key and value `[1, kv_heads, T, dim]`."""
    assert attending is not None, "the cast_ray attention runs inside Target.forward only"
    layer = Layer(
        index=int(module.layer_idx),  # type: ignore[arg-type]
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    out = attending.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(frozen=True)
class TargetOutput:
    """logits: `[n, vocab]` at the rows asked for; features: `[T, taps * hidden]`, None when no layer is tapped."""

    logits: Tensor
    features: Tensor | None


class Target:
    """A loaded target with its KV pool.

    taps: decoder layers whose output is a feature, in the order of the drafter's config. rows: requests at once, each
    of which has a state where the target is recurrent.
    """

    def __init__(
        self, loaded: LoadedTarget, backend: AttentionBackend, slots: int, taps: tuple[int, ...] = (), rows: int = 1
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.backend = backend
        self.device = self.model.device
        self.dtype = self.model.dtype
        config = self.model.config.get_text_config()
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.cache = KVCache(
            *kv_shape(config), slots=slots, dtype=self.dtype, device=self.device, scratch=backend.page_size
        )
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.head: nn.Module = self.model.get_output_embeddings()
        self.taps = taps
        self.native = find_native(self.model)
        self.graphs: TargetGraphs | None = None
        self.states = keep_states(self.model, rows)
        self._tapped: dict[int, Tensor] = {}
        self._hook_layers()

    def forward(self, step: Step, logit_rows: Tensor) -> TargetOutput:
        """One pass over the step's tokens; their keys and values end up in the pool.

        logit_rows: `[n]` int64 rows of the flattened batch whose next-token logits are wanted; n may be 0.
        The output is valid until the next forward: a captured one writes over it.
        """
        if self.graphs is not None:
            output = self.graphs.run(step, logit_rows)
            if output is not None:
                return output
        if self.native is not None and self.native.can_run(step):
            return self._compute_natively(self.native, step, logit_rows)
        return self.compute(begin(step, self.cache, self.backend), logit_rows)

    def compute(self, attending: Attending, logit_rows: Tensor | int) -> TargetOutput:
        """The model itself over a planned step. logit_rows: as in `forward`; 0 stands for all rows."""
        step = attending.step
        if self.states is not None:
            self.states.begin(step)
        output = self.model(
            input_ids=step.tokens[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            attending=attending,
        )
        features = None
        if self.taps:
            features = torch.cat([self._tapped[layer] for layer in self.taps], dim=-1)
            self._tapped.clear()
        return TargetOutput(output.logits[0], features)

    def _compute_natively(self, native: NativeDecoder, step: Step, logit_rows: Tensor) -> TargetOutput:
        hidden = F.embedding(step.tokens, self.embedding)
        angles = self.model.get_decoder().rotary_emb.look_up(hidden, step.positions)
        hidden, features = native.run(step, hidden, angles, self.cache, self.backend.page_size, self.taps)
        return TargetOutput(self.head(hidden.index_select(0, logit_rows)), features)

    def _hook_layers(self) -> None:
        decoder = self.model.get_decoder()
        layers = decoder.layers
        for tap in self.taps:
            # The public feature of the last layer is transformers' hidden_states[-1], which the final norm has passed.
            module = decoder.norm if tap == len(layers) - 1 else layers[tap]
            module.register_forward_hook(self._keep(tap))

    def _keep(self, tap: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._tapped[tap] = hidden[0]

        return hook


def find_native(model: Any) -> NativeDecoder | None:
    """The compiled decoder of a target on a CPU, None where its layers are not of a kind that it knows."""
    if not native.available():
        return None
    from cast_ray.models.native.adopt import native_decoder

    return native_decoder(model)


def kv_shape(config: Any) -> tuple[int, int, int]:
    """(layers, kv_heads, head_dim) of a text config's attention layers."""
    heads = int(config.num_attention_heads)
    layers = sum(kind != RECURRENT for kind in layer_kinds(config))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers, int(getattr(config, "num_key_value_heads", None) or heads), int(head_dim)


def short_context(config: Any) -> int | None:
    """Positions up to which a text config's rotary frequencies are fixed; None where they are for all.

    LongRoPE takes other frequencies as soon as any position of a forward lies beyond: one long request would change
    the others of its batch.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if not any(part.get("rope_type") == "longrope" for part in kinds):
        return None
    limits = [part.get("original_max_position_embeddings") for part in kinds]
    limits.append(getattr(config, "original_max_position_embeddings", None))
    return min((int(limit) for limit in limits if limit), default=None)
