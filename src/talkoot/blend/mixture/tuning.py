"""Gates trained by gradient, everything else frozen: from closed-form gates on, or from random ones.

Fine-tuned closed-form gates: "DUME", arXiv 2603.29765; from random ones: Branch-Train-MiX (Sukhbaatar et al. 2024,
arXiv 2403.07816), of which only the gates are trained here.

A token that visits one expert, with a weight of exactly 1, tells the gate nothing: the loss does not depend on its
score. So either tokens visit two, or weights are shares of a softmax over all, or a term for balanced load is added
(Fedus et al. 2021, arXiv 2101.03961).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from talkoot.blend.mixture.layer import Routing
from talkoot.blend.mixture.model import Mixture
from talkoot.core.errors import TalkootError
from talkoot.model.fit import FitSettings, Fitter, next_token_loss


def tune_gates(mixture: Mixture, batches: Iterable[Tensor], settings: FitSettings, balance: float = 0.0) -> list[float]:
    """Train the gates on next-token loss, in place; one step per batch, deterministic.

    Args:
        mixture: its gates have values, closed-form or random.
        batches: int64 (B, T + 1), of all domains in turn.
        settings: rates; the reference's are 1e-4 over 1,000 steps, 10 of them warm-up.
        balance: factor of the load-balance term, a mean over blocks; 0 leaves it out.

    Returns:
        Loss of each step, the balance term included.

    Raises:
        TalkootError: the gates would get no gradient, there are none, or training diverges.
    """
    config = mixture.config
    parameters = {name: value for name, value in mixture.gate_tensors().items() if value.requires_grad}
    if not parameters:
        raise _bad(f"gate {config.gate!r} has no weights, at most counts", "choose a gate that has: token or mean")
    if config.top_k == 1 and config.renormalised and not balance > 0:
        why = "each token visits one expert with a weight of exactly 1, so the loss does not depend on the gate"
        raise _bad(why, "let tokens visit two experts (top_k = 2), or add a load-balance term (balance = 0.01)")
    fitter, losses = Fitter(parameters, settings), []
    for rows in batches:
        with mixture.watched() as seen:
            loss = next_token_loss(mixture, rows)
        if balance:
            loss = loss + balance * load_balance(seen)
        losses.append(fitter.step(loss))
    return losses


def load_balance(seen: Sequence[Routing]) -> Tensor:
    """``D sum over d of mean(p_d) mean(u_d)``, a mean over blocks: p is a softmax over all scores, u what was used.

    It is 1 where every expert gets the same share, and larger the more they differ.
    """
    terms = []
    for one in seen:
        shares = one.scores.softmax(-1, dtype=torch.float32)
        used = torch.zeros_like(shares).scatter(-1, one.chosen, one.weights.to(shares.dtype))
        terms.append(shares.shape[-1] * (shares.mean(0) * used.mean(0)).sum())
    return torch.stack(terms).mean()


def _bad(why: str, next: str) -> TalkootError:
    return TalkootError("the gates cannot be trained", where="gate fine-tuning", why=why, next=next)
