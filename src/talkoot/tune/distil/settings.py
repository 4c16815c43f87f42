"""What users may set for self-distillation; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from talkoot.run.section import Section
from talkoot.tune.distil.divergence import divergences


class Distillation(Section, frozen=True, kw_only=True):
    """How a policy learns from itself with a hint.

    Attributes:
        divergence: ``reverse`` (best for small solvers), ``forward``, ``jsd`` or ``pg``.
        beta: the teacher's weight in the mixture of ``jsd``.
        top_k: the teacher's likeliest tokens that are told apart, the others count as one; 0 = all. Exact where the
            vocabulary is no larger.
        blend: share of the reward's advantage in the token's: ``blend * A_reward + (1 - blend) * A_hint``, with ``pg``
            only (SDPO, arXiv 2601.20802).
    """

    divergence: str = "reverse"
    beta: float = 0.5
    top_k: int = 100
    blend: float = 0.0

    @property
    def own_only(self) -> bool:
        """Whether only one's own rollouts can be learned from: an estimate from the sampled token is of the policy
        that sampled it; the other divergences compare whole distributions, whoever wrote the tokens before."""
        return self.divergence == "pg"

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        _ = divergences[self.divergence]  # a misspelt name is an error of its own
        yield "beta", 0 < self.beta < 1, "between 0 and 1"
        yield "top_k", self.top_k >= 0, "at least 0 (0 = all tokens)"
        blends = self.blend == 0 or self.divergence == "pg"
        yield "blend", 0 <= self.blend <= 1 and blends, "from 0 to 1, and 0 unless divergence is pg"
