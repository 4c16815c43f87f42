"""Routed pipelines with real processes: killed relays leave no trace, and the simulator's clock is right."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import msgspec
import pytest
from processes import Ran, execute, tiny, write_text

from talkoot.plan.steps import Route
from talkoot.run.folder import LOG
from talkoot.train.recipe import Recipe, Swarm
from talkoot.train.records import Mended
from talkoot.train.verify import verify
from talkoot.world.faults import Fault
from talkoot.world.links import Link, Network

ROUTES = (
    Route(("alder", "cedar", "elm"), 2),
    Route(("alder", "gum", "dogwood"), 2),  # stage 3 before stage 1
    Route(("birch", "dogwood", "hazel"), 2),
    Route(("birch", "fir", "gum"), 2),
)


def routed(text: Path, steps: int, faults: tuple[Fault, ...] = (), **swarm) -> Recipe:
    """Eight peers, two for each stage of a ring; every microbatch skips one stage of four."""
    ring = Swarm(layout="ring", groups=(2, 2, 2, 2), slots=4, **swarm)
    settings = {"planner": "routes", "microbatches": 8, "full_every": 3}
    recipe = tiny(text, steps=steps, depth=4, swarm=ring, faults=faults, **settings)
    return msgspec.structs.replace(recipe, routes=ROUTES)


def test_relays_killed_on_the_way_out_and_on_the_way_back_leave_no_trace(tmp_path):
    text = write_text(tmp_path)
    faults = (Fault(peer="dogwood", step=1, phase="forward"), Fault(peer="gum", step=3, phase="backward"))
    hurt = execute(routed(text, 6, faults), tmp_path / "hurt")
    calm = execute(routed(text, 6), tmp_path / "calm", sim=True)
    assert hurt.losses == calm.losses
    assert hurt.result.state_hash == calm.result.state_hash != ""
    mended = [receipt.read(Mended) for receipt in hurt.receipts("train.mend")]
    assert [facts.lost for facts in mended] == [("dogwood",), ("gum",)]
    assert [(facts.repaired, facts.skipped, facts.restarted) for facts in mended] == [(4, 0, 0), (4, 0, 0)]
    assert all(facts.repeated <= facts.repaired for facts in mended), "at most one stage's forward for each hole"
    findings = verify(tmp_path / "hurt" / LOG)
    assert findings.faults == ()
    assert set(findings.replaced) == {"dogwood", "gum"}


def step_seconds(ran: Ran) -> float:
    """Median time from commit to commit, the first ones left out."""
    commits = [receipt.ended for receipt in ran.receipts("train.commit")]
    return statistics.median(after - before for before, after in itertools.pairwise(commits[2:]))


@pytest.mark.parametrize("seed", [1])
def test_eight_processes_with_shaped_links_take_the_time_that_the_simulator_says(seed, tmp_path):
    text = write_text(tmp_path)
    link = Link(latency_s=0.06, bytes_per_s=4e6)
    names = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "gum", "hazel")
    links = {
        f"{a}->{b}": Link(latency_s=0.02 * (1 + (i + j) % 4)) for i, a in enumerate(names) for j, b in enumerate(names)
    }
    recipe = routed(text, 9, flops=4e8, emulate=True)
    recipe = msgspec.structs.replace(recipe, network=Network(default=link, links=links), seed=seed)
    real, simulated = execute(recipe, tmp_path / "real"), execute(recipe, tmp_path / "sim", sim=True)
    assert real.losses == simulated.losses
    assert step_seconds(real) == pytest.approx(step_seconds(simulated), rel=0.1)
