"""A peer's own account of its part of a step, checked before it enters the log."""

from __future__ import annotations

from talkoot.core.ids import Digest, PeerId, RunId
from talkoot.core.receipt import Signed
from talkoot.run.journal import Journal
from talkoot.train.records import Worked

Share = tuple[int, tuple[int, ...]]  # a peer's stage and, in order, its microbatches


def append_work(
    journal: Journal, run: RunId, peer: PeerId, signed: Signed | None, address: tuple[int, int], share: Share
) -> Digest:
    """Append a peer's receipt for its part of a step.

    Args:
        address: the step and the generation that it is to be about.

    Raises:
        ValueError: it states anything else, or is somebody else's.
    """
    if signed is None:
        raise ValueError("nothing was signed")
    receipt = signed.open()
    stated = (receipt.peer, receipt.run, receipt.op, receipt.step, receipt.generation)
    if stated != (peer, run, "train.step", *address):
        raise ValueError(f"it is about {stated[2:]} of peer {receipt.peer[:8]}")
    facts = receipt.read(Worked)
    if (facts.stage, facts.microbatches) != share:
        raise ValueError(f"it claims stage {facts.stage}, microbatches {facts.microbatches}, the plan said {share}")
    return journal.append(signed)
