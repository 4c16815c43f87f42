"""Replicas that never talk: the baseline that any mixing has to beat.

It is averaging in groups of one. The mean is one's own message, the fast weights, and a round moves the slow weights
there; nothing is sent.
"""

from __future__ import annotations

from talkoot.train.mixing.epidemic import PairAverage
from talkoot.train.mixing.outer import Partners
from talkoot.train.mixing.rule import mixing_rules


class Alone(PairAverage):
    """See the module's text; implements :class:`~talkoot.train.mixing.rule.RoundRule`."""

    partners: Partners = "none"
    law = ""


mixing_rules.register("none")(Alone())
