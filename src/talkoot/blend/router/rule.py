"""How a prompt is scored for each domain: protocol and registry. A rule is a pure function of what was counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from talkoot.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from talkoot.blend.statistics import Features, Gram

#: token ids (T,) int64, T >= 1, to a score for each domain, (D,) float64; what counts is differences
Scorer: TypeAlias = "Callable[[Tensor], Tensor]"


@dataclass(frozen=True)
class Counted:
    """All domains' statistics side by side.

    Attributes:
        names: of the D domains.
        features: what was counted.
        unigrams: (vocabulary, D) int64.
        bigrams: (buckets, D) int32.
        grams: each domain's second moments of chunk sums, by name; empty where features have no table.
    """

    names: tuple[str, ...]
    features: Features
    unigrams: Tensor
    bigrams: Tensor
    grams: dict[str, Gram]


class Rule(Protocol):
    """Makes a scorer of counts; bit for bit the same from the same counts."""

    def __call__(self, counted: Counted) -> Scorer: ...


rules: Registry[Rule] = Registry("routing rule")
