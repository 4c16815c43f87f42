"""A peer's policy from a run's newest stored state, as a folder for everybody else's tools."""

from __future__ import annotations

from pathlib import Path

from talkoot.core.errors import TalkootError
from talkoot.core.fold import fold
from talkoot.core.log import Log
from talkoot.core.plain import build
from talkoot.run.folder import LOG
from talkoot.tune.recipe import UNUSABLE, TuneRecipe
from talkoot.tune.tuner import open_for_reading
from talkoot.world.blobs import Blobs


def export_policy(run: Path, out: Path, name: str | None = None) -> tuple[str, int]:
    """Write a peer's model folder (an adapter is merged into its model).

    Args:
        run: the run's folder.
        out: folder to write; must not hold anything yet.
        name: of the peer; may be left out where there is one only.

    Returns:
        The peer's name, and after how many rounds its state was stored.

    Raises:
        TalkootError: there is no such peer, it has stored nothing yet, or ``out`` is in use.
    """
    log = Log(run / LOG, readonly=True)
    try:
        state = fold(log.entries())
    finally:
        log.close()
    tuned, start = state["tune"], state["run"].start
    if name is None and len(tuned.peers) == 1:
        name = next(iter(tuned.peers))
    peers = ", ".join(sorted(tuned.peers))
    if name is None or name not in tuned.peers:
        why = f"there is no peer {name!r}; there are {peers}" if name else f"the run has several peers: {peers}"
        raise TalkootError("which policy is wanted?", where=str(run), why=why, next="name one of them with --peer")
    if out.exists() and any(out.iterdir()):
        raise TalkootError(
            "the folder is in use",
            where=str(out),
            why="something is in it, and nothing is overwritten",
            next="name a new folder",
        )
    blobs = Blobs(run / "blobs")
    kept = [one for one in tuned.peers[name].kept if blobs.holds_whole(one[1])]
    if not kept:
        lost = bool(tuned.peers[name].kept)
        raise TalkootError(
            f"no state of {name} can be read" if lost else f"{name} has stored nothing yet",
            where=str(run),
            why="what was stored is damaged or gone"
            if lost
            else "states are stored every tune.checkpoint_every rounds and at the end",
            next="let the run go on, and export again",
        )
    round_number, blob = kept[-1]
    recipe = build(dict(start.recipe), TuneRecipe, what=UNUSABLE, where=str(run))
    tuner = open_for_reading(recipe, name, blobs.get(blob), f"{run}, blob {blob[:8]}")
    tuner.policy.export(str(out))
    return name, round_number
