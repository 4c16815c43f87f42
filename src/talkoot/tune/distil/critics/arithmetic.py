"""Feedback aligned to the steps of an addition, computed: what was right, then how it should have gone on.

The four cases of arXiv 2606.11173. Everything up to the first mistake is repeated to the letter, so that the teacher,
who copies, agrees with it; the mistake itself is never quoted, or it would be copied, too; instead stands the right
step, in the order of operands that the writer uses, and what follows from it.
"""

from __future__ import annotations

from talkoot.tune.distil.critics.critic import Critic, CriticSettings, Feedback, Rollout, Rule, critics
from talkoot.tune.tasks.traces import Verdict, columns, judge, parse


def aligned(rollout: Rollout) -> Feedback:
    """The rollout as it should have been, nearest to how it was."""
    try:
        verdict = judge(rollout.item.prompt, rollout.completion)
    except ValueError:
        return Feedback(skip="not an addition")
    case = _case(rollout, verdict)
    return Feedback(context=rollout.completion[: verdict.start] + verdict.correction, case=case)


@critics.register("arithmetic")
def arithmetic(settings: CriticSettings) -> Critic:
    """Judges traces like ``7+5+0=12;4+8+1=13;132``."""
    return Rule(aligned)


def _case(rollout: Rollout, verdict: Verdict) -> str:
    if verdict.status == "right":
        return "reproduced"
    if verdict.status == "unfinished":
        return "finished"
    # A right answer for which steps are missing: what is missing is put in.
    left_out = len(parse(rollout.completion).steps) < len(columns(rollout.item.prompt))
    return "inserted" if rollout.reward.right and left_out else "corrected"
