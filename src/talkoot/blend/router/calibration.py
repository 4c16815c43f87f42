"""What scores are worth: probabilities that hold, and when to say "I do not know", learned from held-out prompts.

Scores grow with a prompt's length, and so does what they are worth; so everything is fitted at a few lengths and
interpolated between them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from talkoot.core.errors import TalkootError

LENGTHS = (16, 64, 256)
MISSED = -1e30  # below every log-likelihood
NEVER = 2.0  # above every probability


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for prompts of one length.

    Attributes:
        length: in tokens.
        temperature: that scores are divided by before the softmax.
        confidence: below it a prompt is not routed.
        familiarity: likewise, in nats per token.
    """

    length: int
    temperature: float = 1.0
    confidence: float = 0.0
    familiarity: float = MISSED


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Points by rising length; at first one that changes nothing.

    Attributes:
        points: at least one.
    """

    points: tuple[Point, ...] = (Point(length=1),)

    def at(self, length: int) -> Point:
        """Between two points, in the logarithm of the length (temperatures in theirs); beyond the ends, the end's."""
        points = self.points
        after = bisect_right([point.length for point in points], length)
        if after in (0, len(points)):
            return points[min(after, len(points) - 1)]
        low, high = points[after - 1], points[after]
        share = math.log(length / low.length) / math.log(high.length / low.length)
        return Point(
            length=length,
            temperature=low.temperature ** (1 - share) * high.temperature**share,
            confidence=low.confidence + share * (high.confidence - low.confidence),
            familiarity=low.familiarity + share * (high.familiarity - low.familiarity),
        )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What calibration aims at.

    Attributes:
        risk: share of prompts that may go to a wrong expert.
        refused: share of prompts of known domains that may count as unknown for their strangeness.
        lengths: of prompts, in tokens.
        prompts: per domain and length.
        seed: of their choice.
    """

    risk: float = 0.02
    refused: float = 0.03
    lengths: tuple[int, ...] = LENGTHS
    prompts: int = 200
    seed: int = 0


def calibrate(
    measure: Callable[[Tensor], tuple[Tensor, float]],
    names: Sequence[str],
    documents: Mapping[str, Sequence[Sequence[int]]],
    wanted: Wanted,
) -> Calibration:
    """Fit all points.

    Args:
        measure: a prompt's ids to its scores (D,) and its familiarity.
        names: of the domains, in the scores' order.
        documents: held-out ones of each domain, as token ids.
        wanted: the aims.

    Raises:
        TalkootError: a domain's held-out text is shorter than the shortest prompt.
    """
    points: list[Point] = []
    for length in sorted(set(wanted.lengths)):
        drawn = [draw_prompts(documents.get(name, ()), length, wanted.prompts, wanted.seed) for name in names]
        if not all(drawn):
            continue  # a domain has too little text for a prompt of this length
        measured = [measure(prompt) for prompts in drawn for prompt in prompts]
        labels = torch.tensor([label for label, prompts in enumerate(drawn) for _ in prompts])
        scores = torch.stack([scores for scores, _ in measured])
        familiarity = torch.tensor([familiar for _, familiar in measured], dtype=torch.float64)
        temperature = fit_temperature(scores, labels)
        points.append(
            Point(
                length=length,
                temperature=temperature,
                confidence=confidence_for(scores / temperature, labels, wanted.risk),
                familiarity=familiarity_for(familiarity, wanted.refused),
            )
        )
    if not points:
        lengths = {name: sum(map(len, documents.get(name, ()))) for name in names}
        name = min(lengths, key=lambda name: lengths[name])
        raise TalkootError(
            "the router cannot be calibrated",
            where=name,
            why=f"its held-out documents have {lengths[name]} tokens, and a prompt takes {min(wanted.lengths)}",
            next="hold out more documents",
        )
    return Calibration(points=tuple(points))


def draw_prompts(documents: Sequence[Sequence[int]], length: int, count: int, seed: int) -> list[Tensor]:
    """Pieces of ``length`` tokens: a document by chance, each alike, then a place in it.

    Documents that are shorter are joined with the short ones after them until they are long enough: entries of a
    dictionary make prompts too. Without that many tokens there are no prompts.
    """
    pool = list(_long_enough(documents, length))
    chance = torch.Generator().manual_seed(seed)
    prompts: list[Tensor] = []
    for _ in range(count if pool else 0):
        document = pool[int(torch.randint(len(pool), (), generator=chance))]
        first = int(torch.randint(len(document) - length + 1, (), generator=chance))
        prompts.append(torch.as_tensor(document[first : first + length], dtype=torch.int64))
    return prompts


def _long_enough(documents: Sequence[Sequence[int]], length: int) -> Iterator[Sequence[int]]:
    joined: list[int] = []
    for document in documents:
        if len(document) >= length:
            yield document
            continue
        joined.extend(int(token) for token in document)
        if len(joined) >= length:
            yield joined
            joined = []


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature of least cross-entropy (Guo et al., arXiv 1706.04599), of scores (n, D).

    Labels count as almost certain (Platt 1999), so that prompts without any error leave it finite. The loss is convex
    in the inverse, and its derivative changes sign once.
    """
    doubt = 1.0 / (len(labels) + 2)
    target = torch.full_like(scores, doubt / scores.shape[1])
    target.scatter_add_(1, labels[:, None], torch.full((len(labels), 1), 1 - doubt, dtype=scores.dtype))
    spread = scores - scores.mean(1, keepdim=True)
    low, high = -30.0, 30.0  # of the logarithm of the inverse
    for _ in range(60):
        middle = (low + high) / 2
        chances = (spread * math.exp(middle)).softmax(1)
        if float(((chances - target) * spread).sum()) > 0:
            high = middle
        else:
            low = middle
    return math.exp(-(low + high) / 2)


def confidence_for(logits: Tensor, labels: Tensor, risk: float) -> float:
    """The least confidence at which at most a share ``risk`` of all prompts goes to a wrong expert.

    Conformal risk control (Angelopoulos et al., arXiv 2208.02814): of prompts like these ``(wrong + 1) / (n + 1) <=
    risk`` bounds the expected share of the next. Unattainable with few prompts: then nothing is sure enough.
    """
    best = logits.softmax(1).max(1)
    wrong = best.values[best.indices != labels].sort(descending=True).values
    allowed = math.floor(risk * (len(labels) + 1) + 1e-9) - 1
    if allowed < 0:
        return NEVER
    if allowed >= len(wrong):
        return 0.0
    return math.nextafter(float(wrong[allowed]), math.inf)


def familiarity_for(familiarity: Tensor, refused: float) -> float:
    """The value that at most a share ``refused`` of prompts like these falls below (conformal: of the next one)."""
    below = math.floor(refused * (len(familiarity) + 1) + 1e-9)
    return float(familiarity.sort().values[below - 1]) if below else MISSED
