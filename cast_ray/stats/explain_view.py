"""An explained round on the terminal: the paper's Figure 1 in text, and the sum that chose the width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from cast_ray.engine.tally import SOURCES
from cast_ray.stats.explain import ExplainedRound, Reckoning
from cast_ray.stats.surface import widths_of
from cast_ray.trees.tree import CandidateTree

Decode = Callable[[Sequence[int]], str]


def render(explained: ExplainedRound, decode: Decode, shown: int) -> RenderableType:
    """Tree, what chain and tree committed, and the reckoning. shown: nodes drawn besides those that were committed."""
    parts: list[RenderableType] = [
        Text(f"Round {explained.number}, behind {explained.position} tokens", style="bold"),
        _tree(explained, decode, shown),
        Text(),
        _outcome(explained, decode),
    ]
    if explained.reckoning is not None:
        parts += [Text(), _why(explained, explained.reckoning)]
    times = explained.times
    parts.append(
        Text(
            f"\nIt took {times.draft_ms:.1f} ms to draft, {times.verify_ms:.1f} to verify, {times.host_ms:.1f} beside."
        )
    )
    return Group(*parts)


def _tree(explained: ExplainedRound, decode: Decode, shown: int) -> Tree:
    tree, path, chain = explained.tree, set(explained.path), _chain_nodes(explained)
    drawn = Tree(f"[bold]{_quoted(decode, explained.root)}[/] (root)")
    branches = {-1: drawn}
    left_out = 0
    for node in range(min(explained.width, int(tree.counts[0]))):
        parent = int(tree.parents[0, node])
        if parent not in branches or (node >= shown and node not in path):
            left_out += 1
            continue
        token = _quoted(decode, int(tree.tokens[0, node]))
        style = "bold green" if node in path else "default"
        marks = " ✓" * (node in path) + " [dim]chain[/]" * (node in chain) + _source(tree, node)
        branches[node] = branches[parent].add(
            f"[{style}]{token}[/] [cyan]{float(tree.masses[0, node]):.3f}[/]{marks}", guide_style="dim"
        )
    if left_out:
        drawn.add(f"[dim]… and {left_out} lighter nodes that were verified[/]")
    return drawn


def _source(tree: CandidateTree, node: int) -> str:
    """Where a node of a tree of several sources comes from."""
    if tree.origins is None:
        return ""
    names = [SOURCES[0]] if float(tree.origins.drafter_masses[0, node]) > 0 else []
    if source := int(tree.origins.sources[0, node]):
        names.append(SOURCES[source])
    return f" [magenta]{' + '.join(names)}[/]"


def _outcome(explained: ExplainedRound, decode: Decode) -> Table:
    table = Table("verified", "nodes", "tokens", "committed", box=None)
    for name, nodes, tokens in (
        ("chain", len(explained.chain), explained.chain_committed),
        ("tree", explained.width, explained.committed),
    ):
        table.add_row(name, str(nodes), str(len(tokens)), repr(decode(tokens)))
    return table


def _why(explained: ExplainedRound, reckoning: Reckoning) -> Group:
    """The candidates for the width: what each was expected to bring and to take."""
    widest = len(reckoning.round_ms) - 1
    rows = sorted({*(n for n in widths_of(widest) if n <= widest), min(explained.width, widest)})
    speed = reckoning.expected / reckoning.round_ms
    table = Table("N", "expected R", "ms a round", "tokens/s", box=None)
    if reckoning.rate is not None:
        table.add_column("R - rate * ms")
    for nodes in rows:
        chosen = nodes == explained.width
        values = [f"{reckoning.expected[nodes]:.3f}", f"{reckoning.round_ms[nodes]:.2f}", f"{1000 * speed[nodes]:.2f}"]
        if reckoning.rate is not None:
            values.append(f"{reckoning.expected[nodes] - reckoning.rate * reckoning.round_ms[nodes]:+.3f}")
        table.add_row(f"{nodes}{' ◆' if chosen else ''}", *values, style="bold" if chosen else "")
    if reckoning.rate is None:
        said = f"Of this round's own masses the best tokens a second were at N={int(np.argmax(speed))}."
    else:
        worth = reckoning.expected - reckoning.rate * reckoning.round_ms
        said = (
            f"A ms is worth {reckoning.rate:.4f} tokens here: that is what decoding brings in the long run. "
            f"Candidates are taken while they are expected to bring more; best at N={int(np.argmax(worth))}."
        )
    return Group(Text(f"Why {explained.width} nodes", style="bold"), table, Text(said))


def _chain_nodes(explained: ExplainedRound) -> set[int]:
    """Nodes of the tree that the chain consists of, as far as the tree holds it."""
    tree, found, parent = explained.tree, set(), -1
    for token in explained.chain:
        here = (tree.parents[0] == parent) & (tree.tokens[0] == token) & (tree.depths[0] > 0)
        nodes = here.nonzero()
        if not len(nodes):
            break
        parent = int(nodes[0])
        found.add(parent)
    return found


def _quoted(decode: Decode, token: int) -> str:
    return escape(repr(decode([token])))
