"""The simulated world: what every world promises, and what only this one does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import world_conformance as conformance

from talkoot.world.sim.simulation import Simulation


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise(check):
    Simulation(seed=conformance.SEED).run(check)
