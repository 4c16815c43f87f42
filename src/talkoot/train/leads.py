"""The two ways to lead a run: step by step, each a transaction of all, or in rounds that replicas take alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from talkoot.train.lead import Lead
from talkoot.train.loop import Result, train
from talkoot.train.mixing import mixing_rules
from talkoot.train.recipe import Recipe
from talkoot.train.rounds.lead import RoundLead, train_in_rounds

AnyLead: TypeAlias = Lead | RoundLead


def lead_for(recipe: Recipe) -> Callable[..., AnyLead]:
    """The lead that a recipe's mixing rule needs."""
    return RoundLead if mixing_rules[recipe.mixing.rule].local else Lead


async def begin(lead: AnyLead) -> Result:
    """Run the job from wherever its log says that it is to its end."""
    return await (train_in_rounds(lead) if isinstance(lead, RoundLead) else train(lead))
