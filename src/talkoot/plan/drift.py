"""Notices when peers compute slower or faster than a plan assumed."""

from __future__ import annotations

from collections.abc import Mapping

MEMORY = 0.5  # weight of the newest step
MOST = 1000.0  # times that a peer may be off before its word is not believed
STEPS = 3  # that a peer must have been off for before anything is planned anew


class Drift:
    """Measured speeds, smoothed over steps.

    Args:
        tolerance: share of the assumed speed by which the measured one may be off; 0 = any.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._speeds: dict[str, float] = {}
        self._off: dict[str, int] = {}

    def note(self, name: str, assumed: float, expected_s: float, took_s: float) -> None:
        """One step of one peer.

        Args:
            assumed: the speed that the plan reckons with.
            expected_s: seconds that its work takes at speed 1; ``took_s``: those that it took.
        """
        if expected_s <= 0 or took_s <= 0:
            return
        speed = min(max(expected_s / took_s, assumed / MOST), assumed * MOST)  # a stranger's figure
        speed = self._speeds[name] = MEMORY * speed + (1 - MEMORY) * self._speeds.get(name, speed)
        self._off[name] = self._off.get(name, 0) + 1 if abs(speed / assumed - 1) > self.tolerance else 0

    def news(self) -> Mapping[str, float]:
        """Everybody's measured speed, if somebody has been off for long enough; the count starts again then."""
        if not self.tolerance or all(count < STEPS for count in self._off.values()):
            return {}
        self._off.clear()
        return dict(self._speeds)
