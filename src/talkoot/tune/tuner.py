"""A peer's mind, without its surroundings: answer, judge, choose, learn, score. The peer (``peer.py``) does the talking."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.tune.assign import Assignment, assignments, refill
from talkoot.tune.completion import Group, PromptRef, seeds_of
from talkoot.tune.distil.critics import open_critic
from talkoot.tune.distil.learner import DistilLearner
from talkoot.tune.distil.lessons import prepare
from talkoot.tune.evaluate import evaluate
from talkoot.tune.objective.learner import Learner
from talkoot.tune.objective.scored import ScoredGroup
from talkoot.tune.policies.open import open_policy
from talkoot.tune.policies.policy import Policy
from talkoot.tune.policies.selfcheck import self_check
from talkoot.tune.recipe import TuneRecipe
from talkoot.tune.records import Evaluation, Generated, Updated
from talkoot.tune.scoring import Scorer, together
from talkoot.tune.select import choose
from talkoot.tune.state import Counters, from_bytes, to_bytes
from talkoot.tune.tasks import open_task
from talkoot.tune.tasks.task import Item, Task
from talkoot.tune.wire import Record

DEFAULT_TOKENS = 64  # of a completion, where neither recipe nor task say


@dataclass(frozen=True, slots=True)
class Batch:
    """A round's own completions: as they travel, as they are learned from, and their texts."""

    groups: list[Group]
    scored: list[ScoredGroup]
    texts: list[str]
    busy_s: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of a round: facts for the receipt (but for what only the peer knows), the weights' hash before, and
    the receipts of the completions that were learned from."""

    facts: Updated
    before: str
    parents: tuple[str, ...]
