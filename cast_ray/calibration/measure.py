"""The latency table of a device and pair: from its saved profile, else from the probe, which saves it for the next."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from cast_ray.calibration.probe import Probe
from cast_ray.calibration.profile import Profile, load_profile, profile_key, profile_path, save_profile
from cast_ray.config import EngineConfig
from cast_ray.drafters.base import Drafter
from cast_ray.models.linear import linear_forms
from cast_ray.models.loading import target_fingerprint
from cast_ray.models.target import Target
from cast_ray.width.latency import LatencyTable

logger = logging.getLogger(__name__)
# Seconds that a start takes for what an earlier probe had no time for.
GOING_ON_S = 8.0


class DeviceProfile:
    """One engine's profile: its key, its place, and what it holds."""

    def __init__(self, config: EngineConfig, target: Target, drafter: Drafter | None, max_context: int) -> None:
        self._folder = config.profile_dir
        self._seconds = config.probe_seconds
        self._probe = Probe(
            target,
            drafter,
            page_size=config.page_size,
            max_batch=config.max_batch_size,
            max_nodes=config.max_nodes,
            max_context=max_context,
            top_k=config.candidates_per_depth,
        )
        fingerprint = {
            **target_fingerprint(target.loaded),
            "attention": type(target.backend).__name__,
            "linears": linear_forms(target.model),
        }
        shape = drafter.shape() if drafter is not None else None
        self.key: dict[str, Any] = profile_key(target.device, target.dtype, fingerprint, shape, self._probe.settings())

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return profile_path(self.key, self._folder)

    def table(self, again: bool = False, patient: bool = False) -> LatencyTable:
        """The saved table where all of it was measured under the same conditions, else measured now.

        again: measure whatever is saved. A probe that ran out of time is gone on with at the next call, for a few
        seconds, or where the caller is patient for as long as a first one.
        """
        saved = None if again else load_profile(self.key, self._folder)
        if saved is not None and saved.complete:
            return saved.table
        # What matters most is measured first: later starts fill in the rest without holding their work up for long.
        seconds = self._seconds if saved is None or patient else min(self._seconds, GOING_ON_S)
        logger.info("measuring %s, at most %.0f s", self.key["device"], seconds)
        table, complete = self._probe.measure(seconds, saved.table if saved else None)
        if not complete:
            problem = "%.0f s were too short to measure this device in full: the next start goes on, for up to %.0f s"
            logger.warning(f"{problem}; `cast-ray calibrate` finishes it", seconds, GOING_ON_S)
        save_profile(self.key, Profile(table, complete), self._folder)
        return table
