"""Who the machines are and how they are linked: the profile that a user writes, ships or measures."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from talkoot.world.links import Link


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine.

    Attributes:
        name: unique.
        location: where it stands; links are looked up by name first, then by location.
        layer_sample_s: seconds that the forward of one layer takes for one sample (one sequence).
        slots: microbatches whose activations it can hold at once.
    """

    name: str
    location: str = ""
    layer_sample_s: float = 0.055
    slots: int = 3


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines and links.

    Attributes:
        name: of the network.
        nodes: the machines.
        links: by ``"from->to"``, of node names or locations; a missing direction takes the other one's.
        local: the link inside one location.
        hop_overhead_s: what a message costs both hosts beside the link (copies between device and socket).
    """

    name: str
    nodes: tuple[Node, ...]
    links: Mapping[str, Link] = {}
    local: Link = Link(latency_s=0.001, bytes_per_s=2.0 * 2**30)
    hop_overhead_s: float = 0.0
