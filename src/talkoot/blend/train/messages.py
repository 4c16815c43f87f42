"""What lead and peers say to each other where experts are trained; topics and their bodies."""

from __future__ import annotations

import msgspec

from talkoot.blend.recipe import BlendRecipe
from talkoot.blend.train.jobs import Job
from talkoot.core.receipt import Signed


class BlendJob(msgspec.Struct, frozen=True, kw_only=True):
    """What every peer is told at its launch: the recipe, and the folder with tokenizer and packed text."""

    recipe: BlendRecipe
    folder: str


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``order``: do this.

    Attributes:
        job: what.
        inputs: blobs of the jobs that it needs, by their names.
        resume: blob of the state in which somebody left it; empty = from its beginning.
    """

    job: Job
    inputs: dict[str, str] = {}
    resume: str = ""


class Told(msgspec.Struct, frozen=True):
    """Peer to lead, ``told``: a signed account of a slice of a job, or of its end."""

    signed: Signed
