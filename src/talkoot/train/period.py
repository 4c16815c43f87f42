"""When the next snapshot is due: every so many steps, or as often as what it costs and what losses cost make best."""

from __future__ import annotations

from talkoot.plan.churn_costs import young_daly

WEIGHT = 0.2  # of the newest measurement in the running mean


class Period:
    """See the module's text.

    Args:
        every: steps between snapshots; 0 = none but the last.
        failures_per_hour: expected losses of a stage per hour; where above 0, the period is Young's and Daly's instead.
        num_stages: stages that can be lost.
    """

    def __init__(self, every: int, failures_per_hour: float, num_stages: int) -> None:
        self._every, self._failures_per_s = every, failures_per_hour * num_stages / 3600
        self._step_s, self._cost_s = 0.0, 0.0

    def step_took(self, seconds: float) -> None:
        """A step was begun and committed in this time."""
        self._step_s = seconds if not self._step_s else (1 - WEIGHT) * self._step_s + WEIGHT * seconds

    def snapshot_took(self, seconds: float) -> None:
        """A snapshot held everybody up for this time."""
        self._cost_s = seconds

    @property
    def steps(self) -> int:
        """Steps between snapshots, by what is known; 0 = none."""
        if not self._failures_per_s:
            return self._every
        if not self._step_s:
            return 1
        cost = self._cost_s / self._step_s if self._cost_s else 1.0  # until one was made, as long as a step
        return max(1, round(young_daly(cost, self._failures_per_s * self._step_s)))

    def due(self, step: int, saved_at: int | None) -> bool:
        """Whether a snapshot is due after ``step`` committed steps."""
        if not self._failures_per_s:
            return self._every > 0 and step % self._every == 0
        return step - (saved_at or 0) >= self.steps
