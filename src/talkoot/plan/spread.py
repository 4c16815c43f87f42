"""How far replicas drift apart when only random groups average, and when they never come together again.

Each round a replica's slow weights move by the mean progress D of its group, by momentum, and by a pull towards the
group's mean. With alpha the momentum, beta the outer rate, gamma the pull, mean() over the group of n:

- ``heavy-ball``: d <- alpha d + beta mean(D) - gamma (w - mean(w));  w <- w + d       (NoLoCo, arXiv 2506.10911)
- ``nesterov``:   g = beta mean(D) - gamma (w - mean(w));  b <- alpha b + g;  w <- w + g + alpha b       (our own)
- ``average``:    w <- w + beta mean(D) - gamma (w - mean(w))                    (gossip; no momentum)

Deviations from the mean over all replicas obey a linear recursion with random groups. So their second moments, of
weights, of momentum, and of both with each other, obey a linear map of three numbers, exactly, when progress is
independent from replica to replica: see :func:`_moments`. Its spectral radius is the factor per round by which an
ensemble without noise comes together (below 1) or flies apart; its fixed point is the spread that noise keeps up.

NoLoCo's printed condition, by a conjecture instead of this map, is neither necessary nor sufficient: at alpha 0.9 its
whole interval diverges. For two of many by heavy ball the exact condition is 0 < gamma < 2 (1 - alpha^2). What is
stable among many is stable among few.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from talkoot.core.errors import TalkootError, nearest

Law: TypeAlias = Literal["heavy-ball", "nesterov", "average"]
LAWS: tuple[Law, ...] = get_args(Law)
Floats = NDArray[np.float64]

MARGIN = 0.9  # of the largest stable pull: what is recommended where a pull is too strong
MOST_PULL = 4.0  # above every stable pull: without momentum the limit is 2, and 2 (1 + alpha) in very large groups
_HALVINGS = 50
_GOLDEN = (math.sqrt(5) - 1) / 2


class Stable(msgspec.Struct, frozen=True, kw_only=True):
    """The nearest settings at which replicas stay together, both with a margin.

    Attributes:
        pull: the strongest at the same momentum.
        momentum: the largest at the same pull; None when that is too strong for any.
    """

    pull: float
    momentum: float | None


def contraction(law: str, momentum: float, pull: float, group: int = 2, *, replicas: int | None = None) -> float:
    """The factor per round on the variance of replicas that make no progress; they fly apart where it is above 1.

    Args:
        law: one of :data:`LAWS`.
        momentum, pull: alpha in [0, 1) and gamma.
        group: n, how many mix with each other.
        replicas: how many there are; None = many more than a group.

    Raises:
        ValueError: such settings there are not.
    """
    return float(np.abs(np.linalg.eigvals(_moments(law, momentum, pull, group, replicas)[0])).max())


def is_stable(law: str, momentum: float, pull: float, group: int = 2) -> bool:
    """Whether the spread of many replicas stays bounded; a pull of 0 never brings them together."""
    return pull > 0 and contraction(law, momentum, pull, group) < 1


def largest_pull(law: str, momentum: float, group: int = 2) -> float:
    """The pull below which (and above 0) many replicas are stable."""
    return _boundary(lambda pull: is_stable(law, momentum, pull, group), MOST_PULL)


def best_pull(law: str, momentum: float, group: int = 2) -> float:
    """The pull that keeps many replicas closest together, by golden sections."""
    low, high = 0.0, largest_pull(law, momentum, group)

    def spread(pull: float) -> float:
        return predicted_ratio(law, momentum, 1.0, pull, group)

    for _ in range(_HALVINGS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if spread(left) < spread(right) else (left, high)
    return (low + high) / 2


def predicted_ratio(
    law: str, momentum: float, outer_rate: float, pull: float, group: int = 2, *, replicas: int | None = None
) -> float:
    """The lasting variance of the weights over that of the progress, both between replicas.

    Both are the variances that half the mean squared difference of two replicas estimates, whatever their number.

    Args:
        outer_rate: beta; the others as in :func:`contraction`.

    Returns:
        The ratio; infinity where the spread is not bounded.
    """
    step, noise = _moments(law, momentum, pull, group, replicas)
    if pull <= 0 or np.abs(np.linalg.eigvals(step)).max() >= 1:
        return math.inf
    lasting = np.linalg.solve(np.eye(3) - step, outer_rate**2 * noise)
    return float(lasting[0]) * (1.0 if replicas is None else replicas / (replicas - 1))


def nearest_stable(law: str, momentum: float, pull: float, group: int = 2) -> Stable:
    """What to write instead: a weaker pull at the same momentum, or less momentum at the same pull."""

    def bears(alpha: float) -> bool:
        return is_stable(law, alpha, pull / MARGIN, group)

    least = bears(0.0) and law != "average"
    return Stable(
        pull=min(pull, MARGIN * largest_pull(law, momentum, group)),
        momentum=min(momentum, _boundary(bears, 1.0)) if least else None,
    )


def check(law: str, momentum: float, outer_rate: float, pull: float, group: int = 2) -> None:
    """Refuse settings with which replicas fly apart; a pull of exactly 0, which says so, is let through.

    Raises:
        TalkootError: naming the recipe's key, the factor per round, and the nearest stable values.
    """
    del outer_rate  # it scales the spread, and has no part in whether that is bounded
    factor = contraction(law, momentum, pull, group)
    if pull == 0 or is_stable(law, momentum, pull, group):
        return
    stable = nearest_stable(law, momentum, pull, group)
    strong = pull > 0
    advice = f"set mixing.pull to at most {_floor(stable.pull if strong else best_pull(law, momentum, group))}"
    if strong and stable.momentum is not None:
        advice += f", or mixing.momentum to at most {_floor(stable.momentum)}"
    raise TalkootError(
        "these replicas would fly apart",
        where="the recipe, key mixing.pull",
        why=f"with momentum {momentum:g} and pull {pull:g} their variance grows by a factor of {factor:.3g} per round; "
        f"groups of {group} by {law} are stable below a pull of {largest_pull(law, momentum, group):.3g}",
        next=advice,
    )


def _moments(law: str, alpha: float, gamma: float, group: int, replicas: int | None) -> tuple[Floats, Floats]:
    """The round's map on (E[w w], E[w m], E[m m]), w a weight's and m its momentum's deviation from the mean over
    all, (3, 3); and what progress of variance 1 adds to them, (3,), at an outer rate of 1.

    What is left over when the number of replicas is divided by n forms a smaller group; a share of the rounds, each
    replica is in that.
    """
    if law not in LAWS:
        raise ValueError(f"there is no law {law!r}; {nearest(law, LAWS)}")
    if not 0 <= alpha < 1 or not -math.inf < gamma < math.inf or group < 2 or (law == "average" and alpha):
        raise ValueError(f"momentum {alpha}, pull {gamma} and groups of {group} do not go with the law {law!r}")
    if replicas is None:
        return _in_groups(law, alpha, gamma, group, math.inf)
    if replicas < group:
        raise ValueError(f"{replicas} replicas are no group of {group}")
    step, noise = _in_groups(law, alpha, gamma, group, replicas)
    if rest := replicas % group:
        rest_step, rest_noise = _in_groups(law, alpha, gamma, rest, replicas)
        share = rest / replicas
        return (1 - share) * step + share * rest_step, (1 - share) * noise + share * rest_noise
    return step, noise


def _in_groups(law: str, alpha: float, gamma: float, size: int, replicas: float) -> tuple[Floats, Floats]:
    """The same for groups of one size.

    A replica's own (w, m) goes through ``own``, that of each other member of its group through ``other``. Deviations
    add up to nothing, so two of them, drawn at random, have -1 / (N - 1) of the variance as their covariance.
    """
    ahead = alpha if law == "nesterov" else 0.0
    enters = np.array([1 + ahead, 1.0])  # how progress, and the pull, enter weight and momentum
    pulled = gamma * np.outer(enters, [1.0, 0.0])
    alone = np.array([[1.0, alpha * ahead if law == "nesterov" else alpha], [0.0, alpha]])
    own, other, others = alone - (1 - 1 / size) * pulled, pulled / size, size - 1
    tied = -1 / (replicas - 1)
    columns: list[Floats] = []
    for unit in ([[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]):
        cov = np.array(unit)
        crossed = own @ cov @ other.T
        among = others * (1 + tied * (others - 1)) * (other @ cov @ other.T)
        columns.append(_three(own @ cov @ own.T + among + tied * others * (crossed + crossed.T)))
    return np.stack(columns, 1), (1 / size - 1 / replicas) * _three(np.outer(enters, enters))


def _three(symmetric: Floats) -> Floats:
    return symmetric[[0, 0, 1], [0, 1, 1]]


def _boundary(holds: Callable[[float], bool], most: float) -> float:
    """Where a property that holds just above 0 ends, by bisection."""
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _floor(value: float) -> float:
    """Three decimals, downwards: what is printed must be stable, too."""
    return math.floor(value * 1000 + 1e-6) / 1000
