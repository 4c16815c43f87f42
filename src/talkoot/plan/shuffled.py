"""Random routing between the replicas of neighbouring stages, drawn anew for every step.

At each stage boundary a permutation says who takes over from whom, and everybody can compute it. Each peer still gets
its share of the microbatches, by speed, so the load is balanced by construction. It is how NoLoCo routes pipelines
(Kolehmainen et al., 2025, arXiv 2506.10911), as a stand-in for the load balancing of SWARM. As gradients here are
summed exactly over all replicas of a stage, it changes no bit of the training: it spreads traffic over more links.
"""

from __future__ import annotations

from talkoot.core.ids import PeerId
from talkoot.plan.pairing import shuffle
from talkoot.plan.steps import StepPlan, View, planners
from talkoot.plan.straight import in_blocks, lay_out


@planners.register("shuffled")
def shuffled(view: View) -> StepPlan:
    """See the module's text; implements :class:`talkoot.plan.steps.Planner`."""
    rows = in_blocks(view)
    places = [f"{microbatch:08d}" for microbatch in range(view.num_microbatches)]
    for stage in range(1, view.num_stages):
        drawn = [int(place) for place in shuffle(places, view.step, stage, f"{view.seed}")]
        rows[stage] = [PeerId(rows[stage][place]) for place in drawn]
    return lay_out(rows, view)
