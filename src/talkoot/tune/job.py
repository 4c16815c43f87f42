"""What every peer of a run is told at its launch."""

from __future__ import annotations

import msgspec

from talkoot.tune.recipe import TuneRecipe


class TuneJob(msgspec.Struct, frozen=True, kw_only=True):
    """The recipe; a peer finds its own part in it by its name."""

    recipe: TuneRecipe
