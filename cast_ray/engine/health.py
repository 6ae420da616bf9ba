"""Whether the drafter's work is worth anything: its acceptance, held against chance, its own promise and its record.

A mismatched drafter makes output slow, never wrong, and in silence. Here that is said, once, with likely causes, and
the engine goes on without the drafter; now and then it is tried again. Pure counting: no model, no clock.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import Tensor

from cast_ray.width.prior import AcceptanceRecord

Verdict = Literal["unknown", "healthy", "behind", "doubtful", "rejected"]

# A verdict needs this many request-rounds, over at least this many rounds: requests of one round may be of a kind.
WINDOW, LEAST_ROUNDS = 96, 8
# Accepted tokens a request-round that anything gets, such as a guess at the commonest words.
CHANCE = 0.03
# A drafter that keeps less of its promise than this is not at work on what it was trained for (sound ones keep half and
# more), and at fewer accepted tokens a request-round than the other number not even a pair of its kind.
KEPT, PAYING = 0.4, 0.2
# It is behind its record where it keeps less than this share of what that lets expect of the same masses, and that by
# more than so many standard errors: on prompts of a kind that was not measured a sound one may keep half.
RECORD_KEPT, CERTAIN = 0.7, 3.0
# Rounds without the drafter before it is tried again, doubled each time in vain up to the last.
FIRST_REST, LONGEST_REST = 500, 16_000

CAUSES = (
    "another target or another quantisation of it than the drafter was trained for",
    "another chat template or thinking mode",
    "a wrong mask_token_id in its config.json",
    "wrong target_layer_ids in its config.json",
    "other positions of its context than it was trained with",
)
logger = logging.getLogger(__name__)


class DrafterHealth:
    """One engine's view of its drafter. `name` is what the user called it; record: what its folder says of it.

    Verdicts: `rejected` (hardly a token is accepted: decode without it), `doubtful` (it keeps less than half of what
    it promises, yet brings something: the width policy weighs it), `behind` (in its place where there is a record: less
    is accepted than that says of such masses), `healthy`, and `unknown` before enough rounds.
    """

    def __init__(self, name: str, record: AcceptanceRecord | None = None) -> None:
        self.name = name
        self._record = record
        self._recorded: Tensor | None = None
        self._against = [0.0, 0.0, 0.0]  # by the record expected, its variance, and accepted of just those requests
        self.verdict: Verdict = "unknown"
        self._rest = FIRST_REST
        self._resting = 0  # rounds still to go without the drafter
        self._rounds = 0
        self._requests = 0
        self._accepted = 0.0
        self._expected = 0.0
        self._last: dict[str, float] = {}

    def may_draft(self) -> bool:
        """Asked once a round, before drafting. False while the drafter rests after it was rejected."""
        if self._resting:
            self._resting -= 1
            return False
        return True

    def recorded_on(self, device: torch.device) -> Tensor | None:
        """`[depths, masses]` float32, accepted over promised as the drafter's folder has it; None without a record."""
        if self._record is not None and (self._recorded is None or self._recorded.device != device):
            self._recorded = torch.from_numpy(self._record.ratios()).float().to(device)
        return self._recorded

    def observe(
        self,
        requests: int,
        accepted: float,
        expected: float,
        recorded: float = 0.0,
        variance: float = 0.0,
        counted: float = 0.0,
    ) -> None:
        """What one drafted round showed, all its requests together.

        requests: those with at least one node verified. accepted: nodes accepted, without the tokens that the target
        adds itself. expected: the sum of the uncorrected masses of the verified nodes. recorded, variance, counted: of
        the greedy requests, what the record lets expect, with its variance, and what was accepted.
        """
        self._against = [a + b for a, b in zip(self._against, (recorded, variance, counted), strict=True)]
        self._rounds += requests > 0
        self._requests += requests
        self._accepted += accepted
        self._expected += expected
        if self._requests >= WINDOW and self._rounds >= LEAST_ROUNDS:
            self._judge()

    def report(self) -> dict[str, Any]:
        """Plain values: the verdict, what it rests on, and what may be wrong where something is."""
        suspect = self.verdict in ("behind", "doubtful", "rejected")
        return {
            "verdict": self.verdict,
            "drafting": self.verdict != "rejected",
            **self._last,
            "likely_causes": list(CAUSES) if suspect else [],
        }

    def _judge(self) -> None:
        accepted, expected = self._accepted / self._requests, self._expected / self._requests
        self._last = {"accepted_a_round": accepted, "promised_a_round": expected}
        recorded, variance, counted = self._against
        if recorded:
            self._last["share_of_record"] = counted / recorded
        behind = counted < RECORD_KEPT * recorded - CERTAIN * variance**0.5
        self._rounds, self._requests, self._accepted, self._expected = 0, 0, 0.0, 0.0
        self._against = [0.0, 0.0, 0.0]
        broken = accepted < KEPT * expected
        before = self.verdict
        if accepted <= CHANCE or (broken and accepted < PAYING):
            self.verdict = "rejected"
            self._resting = self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        else:
            # A drafter may be over-confident by nature, which its record knows and its word does not tell.
            suspect: Verdict = "behind" if recorded else "doubtful"
            self.verdict = suspect if (behind if recorded else broken) else "healthy"
            self._rest = FIRST_REST
        if self.verdict != before:
            self._log(accepted, expected, before)

    def _log(self, accepted: float, expected: float, before: Verdict) -> None:
        found = f"drafter {self.name!r}: {accepted:.2f} of {expected:.2f} promised tokens a round were accepted"
        causes = f"Likely causes: {'; '.join(CAUSES)}. `cast-ray check-drafter` tells them apart"
        if self.verdict == "rejected":
            logger.warning("%s, no better than chance: decoding goes on without it. %s", found, causes)
        elif self.verdict == "doubtful":
            logger.warning("%s: it helps less than it should. %s", found, causes)
        elif self.verdict == "behind":
            says = f"{self._last['share_of_record']:.0%} of the tokens that its record lets expect are accepted"
            logger.warning("drafter %r: %s. Prompts of another kind may be why. %s", self.name, says, causes)
        elif before != "unknown":
            logger.info("%s: it is back at work", found)
