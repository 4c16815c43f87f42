"""Links that cannot be right: a figure in the wrong unit, which no check of ranges finds.

One such slip, 0.2425 GiB/s divided by 1024 once more, made a published schedule wait 132 s for every message on one
link. Neighbours give it away: links of similar latency have similar bandwidths, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from talkoot.world.links import Link

SIMILAR = 2.0  # links count as peers when one figure differs by at most this factor...
FAR = 50.0  # ...and the other one may differ by this much from the peers' median
ENOUGH = 2  # peers without which nothing can be said
MAX_LATENCY_S = 2.0  # one way; by geostationary satellite it is 0.3
MIN_BYTES_PER_S = 1000.0

_FIGURES = ("latency_s", "bytes_per_s")
_SLIPS: tuple[dict[float, str], ...] = (
    {1e3: "milliseconds for seconds", 1e6: "microseconds for seconds"},
    {
        1024.0: "MiB/s for GiB/s, or KiB/s for MiB/s",
        1024.0 / 8: "Mb/s for GB/s",
        1024.0**2: "KiB/s for GiB/s, or bytes for MiB",
        8 * 1024.0: "Mb/s for GiB/s, or Kb/s for MiB/s",
    },
)


def suspects(links: Mapping[str, Link], local: Link) -> list[str]:
    """Suspect links, in words: which, its figure, its peers' figure, and the likely slip; empty = none.

    A link is suspect when its bandwidth is more than 50 times off the median of the links whose latency is within a
    factor 2 of its own (two such links at least), or its latency off that of the links of similar bandwidth, or when
    a figure is one that no network on Earth has. Links in both directions count as two. ``local`` is usually alone in
    its class and is only held to the last rule.
    """
    figures = {key: (math.log(max(link.latency_s, 1e-6)), math.log(link.bytes_per_s)) for key, link in links.items()}
    found: list[str] = []
    for key, link in (*links.items(), ("local", local)):
        suspicion = _absurd(link) or ("" if key == "local" else _unlike(key, figures))
        if suspicion:
            found.append(f"link {key!r}: {suspicion}")
    return found


def _absurd(link: Link) -> str:
    if link.latency_s > MAX_LATENCY_S:
        return f"latency_s = {link.latency_s:g} is over {MAX_LATENCY_S:g} s; milliseconds for seconds?"
    if link.bytes_per_s < MIN_BYTES_PER_S:
        return f"bytes_per_s = {link.bytes_per_s:g} is under {MIN_BYTES_PER_S:g}; MB/s or GB/s for bytes per second?"
    return ""


def _unlike(key: str, figures: Mapping[str, tuple[float, float]]) -> str:
    """What is wrong with the figure that is furthest from its peers', if it is too far; figures are logarithms."""
    own, near = figures[key], math.log(SIMILAR)
    worst, text = FAR, ""
    for figure, like in ((0, 1), (1, 0)):
        peers = [
            other[figure] for other in figures.values() if other is not own and abs(other[like] - own[like]) <= near
        ]
        if len(peers) < ENOUGH:
            continue
        middle = median(peers)  # of logarithms, so that one wrong peer of two does not make the right one suspect
        factor = math.exp(abs(own[figure] - middle))
        if factor > worst:
            worst = factor
            slip = min(_SLIPS[figure].items(), key=lambda item: abs(math.log(item[0] / factor)))
            hint = f"; {slip[1]}?" if 1 / 4 < slip[0] / factor < 4 else ""
            text = (
                f"{_FIGURES[figure]} = {_show(own[figure])} is {factor:.0f} times "
                f"{'less' if own[figure] < middle else 'more'} than the {_show(middle)} of {len(peers)} links "
                f"with similar {_FIGURES[like]}{hint}"
            )
    return text


def _show(logarithm: float) -> str:
    value = math.exp(logarithm)
    return f"{value:,.0f}" if value > 1000 else f"{value:.4g}"
