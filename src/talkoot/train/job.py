"""What every peer of a run is told at its launch, and the arithmetic of the stage that it is to hold."""

from __future__ import annotations

import msgspec

from talkoot.model.config import ModelConfig
from talkoot.train.compute import BlankStage, StageCompute
from talkoot.train.recipe import Recipe


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What every peer of a run is told at its launch.

    Attributes:
        tokens: folder of the packed text; None = the tensor-free rehearsal.
        tokens_digest: of its content; a peer with other text refuses to work.
        free_states: in a tensor-free rehearsal, a state on its way to a newcomer costs nothing.
        held_out_batches: how many there are to evaluate on.
    """

    recipe: Recipe
    config: ModelConfig
    tokens: str | None = None
    tokens_digest: str = ""
    held_out_batches: int = 0
    free_states: bool = False


def make_stage(job: Job, first: int, last: int) -> StageCompute:
    """The stage's arithmetic: with tensors, or without where the job has no text."""
    if job.tokens is None:
        return BlankStage(job.config, first, last, job.recipe, free_states=job.free_states)
    import torch

    from talkoot.train.prepare import open_windows
    from talkoot.train.tensors import TensorStage

    torch.set_num_threads(job.recipe.swarm.threads)
    return TensorStage(job.config, first, last, job.recipe, open_windows(job.recipe, job.tokens, job.tokens_digest))
