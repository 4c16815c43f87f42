"""Ensembles over a simulated network."""

from __future__ import annotations

import pytest

import ensemble_worlds
from talkoot.world.sim.simulation import Simulation


@pytest.mark.parametrize("check", ensemble_worlds.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise(check, tmp_path):
    Simulation(seed=7).run(lambda host: check(host, tmp_path))
