"""What a learner learns from: groups of completions with their rewards, in the learner's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

from talkoot.tune.completion import Finish


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, as a learner sees it.

    Attributes:
        ids: in the learner's own tokenizer.
        reward: from 0 to 1, computed by the learner itself.
        finish: whether it ended by itself.
        gen_logp: the generator's log-probability of each token; None where its tokens are others than the learner's.
        gen_total: the generator's log-probability of the whole completion.
    """

    ids: tuple[int, ...]
    reward: float
    finish: Finish
    gen_logp: tuple[float, ...] | None
    gen_total: float


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Completions of one prompt that are compared with each other.

    Attributes:
        prompt: ids in the learner's own tokenizer.
        peer: name of who generated them (of a group with several generators: ``several``).
        own: the learner made them itself, with its present weights.
        index: the problem's, where a learner has to look it up.
    """

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]
    peer: str
    own: bool
    index: int = -1
