"""An output that is one of a few labels: which tokens may come, the candidates to verify, and each label's probability.

A label is its tokens as the tokenizer writes it, so a token of the output belongs to one place in a tree of prefixes.
The whole tree is verified in one forward where it fits: a label then costs one round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cast_ray.errors import RequestError, describe
from cast_ray.trees.edit import Nodes, heaviest


class LabelTree:
    """The labels' prefixes, breadth first: node 0 is the empty prefix. Shared by all that use the same labels.

    children: token -> node, of each node. labels: label -> its node.
    """

    def __init__(self, labels: Mapping[str, Sequence[int]], end_tokens: Sequence[int]) -> None:
        inner: list[dict[int, int]] = [{}]
        ends: dict[int, str] = {}
        for label, tokens in labels.items():
            at = 0
            for token in tokens:
                if token not in inner[at]:
                    inner[at][token] = len(inner)
                    inner.append({})
                at = inner[at][token]
            if at == 0 or at in ends:
                problem = f"has the tokens of {ends[at]!r}" if at else "has no tokens"
                raise RequestError(describe("choice", label, problem, "Give labels that the tokenizer tells apart"))
            ends[at] = label
        order = [0]
        for node in order:
            order.extend(inner[node].values())
        place = {node: i for i, node in enumerate(order)}
        self.children = [{token: place[child] for token, child in inner[node].items()} for node in order]
        self.labels = {label: place[node] for node, label in ends.items()}
        self.end_tokens = tuple(end_tokens)
        self._whole = frozenset(self.labels.values())
        longer = [label for label, node in self.labels.items() if self.children[node]]
        if longer and not end_tokens:
            problem = "begins another label, and the target has no end-of-sequence token to tell them apart"
            raise RequestError(describe("choice", longer[0], problem, "Reword the labels"))

    def __len__(self) -> int:
        """Nodes besides the empty prefix: candidates that a forward must verify to know them all."""
        return len(self.children) - 1

    def is_label(self, node: int) -> bool:
        """Whether a label may end here."""
        return node in self._whole

    def candidates(self, node: int, most: int) -> Nodes:
        """The first `most` prefixes behind a node, each child as likely as its siblings."""
        tokens, parents, masses = [], [], []
        level = [(node, -1, 1.0)]
        for at, place, mass in level:
            for token, child in self.children[at].items():
                tokens.append(token)
                parents.append(place)
                masses.append(mass / len(self.children[at]))
                level.append((child, len(tokens) - 1, masses[-1]))
        return heaviest(Nodes(tokens, parents, masses), most)

    def probabilities(self, logits: Tensor, nodes: Nodes) -> dict[str, float]:
        """Each label's share of what the target gives to all labels: that the output begins with it, and no longer one.

        logits: `[len(self) + 1, vocab]`, the target's own after the prompt and after each of `nodes`, which are all.
        """
        device = logits.device
        logprobs = logits.float().log_softmax(dim=-1).double()
        parents = torch.tensor(nodes.parents, device=device) + 1
        steps = logprobs[parents, torch.tensor(nodes.tokens, device=device)]
        prefix = torch.zeros(len(nodes) + 1, dtype=torch.float64, device=device)
        going_on = torch.zeros_like(prefix).index_add_(0, parents, steps.exp())
        # A node follows its parent in the order of nodes, depth by depth.
        above, node_of = nodes.parents, [0]
        depth: list[int] = []
        for place, parent in enumerate(above):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            node_of.append(self.children[node_of[parent + 1]][nodes.tokens[place]])
        levels = torch.tensor(depth, device=device)
        for level in range(max(depth) + 1):
            at = (levels == level).nonzero()[:, 0]
            prefix[at + 1] = prefix[parents[at]] + steps[at]
        place_of = {node: place for place, node in enumerate(node_of)}
        ends = torch.tensor([place_of[node] for node in self.labels.values()], device=device)
        scores = prefix[ends] + torch.log1p(-going_on[ends].clamp(max=1.0))
        return dict(zip(self.labels, scores.softmax(dim=0).tolist(), strict=True))


class LabelGrammar:
    """One request's place in a label tree. See `grammar.Grammar`."""

    error = None
    drafts_help = False  # it knows all that may come

    def __init__(self, tree: LabelTree) -> None:
        self.tree = tree
        self._at: int | None = 0  # None: behind the end token

    @property
    def finished(self) -> bool:
        """Nothing may follow."""
        return self._at is None or not self.tree.children[self._at]

    def advance(self, tokens: Sequence[int]) -> int:
        """Take in emitted tokens; how many of them belong to the output."""
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            self._at = self._step(self._at, token)
        return len(tokens)

    def certain_end(self) -> list[int]:
        """The rest of the label, where only one is left."""
        tokens, at = [], self._at
        while at is not None and (children := self.tree.children[at]):
            if len(children) > 1 or self.tree.is_label(at):
                return []
            ((token, at),) = children.items()
            tokens.append(token)
        return tokens

    def candidates(self, drafted: Nodes, most: int) -> Nodes:
        """Labels still possible, as a tree of at most `most` nodes; what was drafted can have no others."""
        if self._at is None or self.finished:
            return Nodes([], [], [])
        return self.tree.candidates(self._at, most)

    def fill(self, nodes: Nodes, mask: NDArray[np.int32]) -> None:
        """What may come after the root and each of `nodes`, as bits: `[nodes + 1, words]`, zeros before."""
        bits = mask.view(np.uint32)
        places = [self._at]
        for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
            places.append(self._step(places[parent + 1], token))
        for row, place in enumerate(places):
            for token in self._next(place):
                bits[row, token >> 5] |= np.uint32(1 << (token & 31))

    def _next(self, place: int | None) -> Sequence[int]:
        if place is None or not self.tree.children[place]:
            # Behind the end of the output: what is emitted there is cut off, whatever it is.
            return (0,)
        ends = self.tree.end_tokens if self.tree.is_label(place) else ()
        return (*self.tree.children[place], *ends)

    def _step(self, place: int | None, token: int) -> int | None:
        return None if place is None else self.tree.children[place].get(token)
