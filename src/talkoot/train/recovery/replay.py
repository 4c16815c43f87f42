"""The lost stage's steps are computed again, it alone, from what its neighbours had sent to it. Bit for bit.

Several lost stages compute them again together: what one of them had sent to another, it sends once more.

Neighbours remember what they sent since the newest snapshot, so nothing more than that snapshot ever crosses the
network while all goes well. (Zhong et al., 2023, "Swift", arXiv 2302.06173.)
"""

from __future__ import annotations

from talkoot.train.recovery.ladder import Loss, Source, rungs


@rungs.register("replay")
def replay(loss: Loss, stage: int) -> Source | str:
    """Serves when all who are left have been there since the snapshot."""
    if loss.logged:
        return loss.logged
    return Source(rung="replay", how="replay", step=loss.step)
