"""Ridge regression of the domain's label on the sum of a chunk's embeddings (Hoerl and Kennard 1970).

What 32 tokens have in common says far more about a domain than each alone, and its second moments add up just as well.
"""

from __future__ import annotations

import torch

from talkoot.blend.router.rule import Counted, Scorer, rules
from talkoot.blend.router.votes import needs_table
from talkoot.blend.solve import ridge
from talkoot.blend.statistics.features import CHUNK


@rules.register("chunk")
def chunk(counted: Counted) -> Scorer:
    """The mean chunk's linear score; a token's share of it is a row of a table."""
    table = counted.features.table
    if table is None:
        raise needs_table()
    weights = ridge(counted.grams, balanced=True).weights
    rows = torch.addmm(weights[-1], table.double(), weights[:-1] * CHUNK)
    return lambda ids: rows[ids].mean(0)
