"""By the mean of the states so far, in every block: as cheap as a gate on single states, and less easily misled.

One running sum per block and text, of a number per expert, is all that generation has to remember.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talkoot.blend.mixture.gates.gate import Gate, gates, running_count, running_sum

if TYPE_CHECKING:
    from torch import Tensor

    from talkoot.model.decoder import Cache, Positions


class _Mean(Gate):
    reads_states = True

    def features(self, x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
        total = running_sum(x, positions, cache, slot)
        return (total / running_count(total, positions)).to(x.dtype)


gates.register("mean")(_Mean())
