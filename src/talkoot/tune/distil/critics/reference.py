"""A worked solution, whatever the rollout looked like: privileged information (arXiv 2601.18734).

Where the rollout went another way than the solution, the teacher finds its correct steps unlikely, too: blame is
diffuse.
"""

from __future__ import annotations

from talkoot.tune.distil.critics.critic import Critic, CriticSettings, Feedback, Rollout, Rule, critics


def solution_of(rollout: Rollout) -> Feedback:
    """The task's worked solution; a task without one gives nothing to show."""
    if not rollout.item.solution:
        return Feedback(skip="no reference solution")
    return Feedback(context=rollout.item.solution, case="reference")


@critics.register("reference")
def reference(settings: CriticSettings) -> Critic:
    """Shows the same solution for all rollouts of a problem."""
    return Rule(solution_of)
