"""Who the machines are and how they are linked: the profile that a user writes, ships or measures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from pathlib import Path

import msgspec

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.plain import build, read_plain
from talkoot.plan.outliers import suspects
from talkoot.plan.problem import Matrix, Problem
from talkoot.world.links import Link, Network

UNUSABLE = "the profile cannot be used"


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

    Raises:
        TalkootError: no node, a name that is empty or taken, a figure that no machine has, a link that ends nowhere,
            or two nodes without a link.
    """

    name: str
    nodes: tuple[Node, ...]
    links: Mapping[str, Link] = {}
    local: Link = Link(latency_s=0.001, bytes_per_s=2.0 * 2**30)
    hop_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        _check_nodes(self)
        _check_links(self)
        for one, other in combinations(self.nodes, 2):
            if self._find(one, other) is None:
                raise _bad(
                    "links",
                    f"nothing links {one.name} and {other.name}: the network is disconnected",
                    f'add "{one.name}->{other.name}" = {{ latency_s = ..., bytes_per_s = ... }} under [links], '
                    "or the same for their locations",
                )

    def link(self, source: str, target: str) -> Link:
        """The link from node ``source`` to node ``target``; KeyError when there is no such node."""
        ends = {node.name: node for node in self.nodes if node.name in (source, target)}
        found = self._find(ends[source], ends[target])
        if found is None:
            raise KeyError(f"{source}->{target}")  # never: every pair was looked up when the profile was made
        return found

    def _find(self, source: Node, target: Node) -> Link | None:
        """By names, else by name and location, else by locations; each in this direction, else in the other."""
        for one in (source.name, source.location):
            for other in (target.name, target.location):
                found = self.links.get(f"{one}->{other}") or self.links.get(f"{other}->{one}")
                if found is not None:
                    return found
        together = source.name == target.name or source.location == target.location != ""
        return self.local if together else None


def load_profile(path_or_name: str | Path, nodes: int | None = None, *, accept_outliers: bool = False) -> Profile:
    """A profile from a TOML or JSON file, or a named network (see :mod:`talkoot.plan.networks`).

    Args:
        path_or_name: anything with a suffix or a folder in it, or that exists, is a path.
        nodes: how many machines: a file's first ones, or as many as wanted of a named network.
        accept_outliers: load a file although a link looks like a slip of the unit.

    Raises:
        TalkootError: no such file or name, an unknown key (with the nearest one), bad figures, outliers, or a file with
            fewer nodes than asked for.
    """
    from talkoot.plan.networks import named_network

    path = Path(path_or_name)
    if not (path.suffix or len(path.parts) > 1 or path.exists()):
        return named_network(str(path_or_name), nodes)
    profile = build(read_plain(path, UNUSABLE), Profile, what=UNUSABLE, where=str(path))
    if not accept_outliers and (found := outliers(profile)):
        raise TalkootError(
            "the profile has links that cannot be right" if len(found) > 1 else "the profile has an unlikely link",
            where=str(path),
            why="; ".join(found),
            next="correct the figure, or say --accept-outliers if it was really measured",
        )
    if nodes is None:
        return profile
    if not 1 <= nodes <= len(profile.nodes):
        why = f"{nodes} nodes were asked for, it has {len(profile.nodes)}"
        raise _bad(str(path), why, f"ask for 1 to {len(profile.nodes)} nodes, or add some to the file")
    return first_nodes(profile, nodes)


def first_nodes(profile: Profile, count: int) -> Profile:
    """The profile of the first ``count`` nodes, without the links of the others."""
    kept = profile.nodes[:count]
    names = {name for node in kept for name in (node.name, node.location)}
    links = {key: link for key, link in profile.links.items() if names.issuperset(key.split("->"))}
    return msgspec.structs.replace(profile, nodes=kept, links=links)


def dump_profile(profile: Profile) -> str:
    """The profile as TOML, which :func:`load_profile` reads back as an equal one."""

    def text(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)  # of numbers and printable characters: the same in TOML

    def table(struct: msgspec.Struct) -> str:
        return ", ".join(f"{key} = {text(value)}" for key, value in msgspec.structs.asdict(struct).items())

    return "\n".join(
        (
            f"name = {text(profile.name)}",
            f"hop_overhead_s = {text(profile.hop_overhead_s)}",
            f"local = {{ {table(profile.local)} }}",
            "nodes = [",
            *(f"  {{ {table(node)} }}," for node in profile.nodes),
            "]",
            "",
            "[links]",
            *(f"{text(key)} = {{ {table(link)} }}" for key, link in profile.links.items()),
            "",
        )
    )


def outliers(profile: Profile) -> list[str]:
    """Links that look like a slip of the unit, in words; see :func:`talkoot.plan.outliers.suspects`."""
    return suspects(profile.links, profile.local)


def to_problem(
    profile: Profile,
    *,
    activation_bytes: float,
    gradient_bytes: float,
    stage_layers: Sequence[int],
    samples: int,
    backward_ratio: float = 1.5,
    loss_ratio: float = 0.25,
) -> Problem:
    """What a planner works on: the seconds of one iteration, from a profile and the sizes of a model.

    Args:
        activation_bytes: one microbatch's activation between two stages.
        gradient_bytes: one stage's whole gradient.
        stage_layers: layers of each stage.
        samples: sequences per microbatch.
        backward_ratio, loss_ratio: see :class:`~talkoot.plan.problem.Problem`.
    """

    def seconds(latency: float, size: float) -> Matrix:
        """Latency (0 = without, 1 = with it and the hosts' overhead) and ``size`` bytes, for every pair of nodes."""
        return tuple(
            tuple(
                0.0 if a is b else latency * (link.latency_s + profile.hop_overhead_s) + size / link.bytes_per_s
                for b, link in zip(profile.nodes, row, strict=True)
            )
            for a, row in zip(profile.nodes, links, strict=True)
        )

    links = [[profile.link(a.name, b.name) for b in profile.nodes] for a in profile.nodes]
    return Problem(
        names=tuple(node.name for node in profile.nodes),
        hop_s=seconds(1, activation_bytes),
        busy_s=seconds(0, activation_bytes),
        share_s=seconds(1, gradient_bytes),
        layer_s=tuple(node.layer_sample_s * samples for node in profile.nodes),
        stage_layers=tuple(stage_layers),
        slots=tuple(node.slots for node in profile.nodes),
        backward_ratio=backward_ratio,
        loss_ratio=loss_ratio,
    )


def to_network(profile: Profile, names: Sequence[str]) -> Network:
    """The profile's links between simulated peers, the hosts' overhead added to the latency.

    Args:
        names: the peers', in the order of the profile's nodes; ValueError when there are more or fewer.
    """
    links: dict[str, Link] = {}
    for (a, one), (b, other) in permutations(zip(profile.nodes, names, strict=True), 2):
        link = profile.link(a.name, b.name)
        links[f"{one}->{other}"] = msgspec.structs.replace(link, latency_s=link.latency_s + profile.hop_overhead_s)
    return Network(links=links)


def _check_nodes(profile: Profile) -> None:
    if not profile.nodes:
        raise _bad("nodes", "there is no node", "write down at least one machine under [[nodes]]")
    if not 0 <= profile.hop_overhead_s < math.inf:
        raise _bad("hop_overhead_s", f"it is {profile.hop_overhead_s}, it must be at least 0 seconds")
    seen: set[str] = set()
    for node in profile.nodes:
        where = f"node {node.name!r}"
        for name in (node.name, node.location):
            if "->" in name or name != name.strip() or not name.isprintable():
                raise _bad(where, f"{name!r} is no name: names are printable and contain no '->'")
        if not node.name or node.name in seen:
            raise _bad(where, "every node needs a name of its own", "give it another name")
        seen.add(node.name)
        if not 0 < node.layer_sample_s < math.inf:  # NaN is neither
            raise _bad(where, f"layer_sample_s is {node.layer_sample_s}, it must be above 0 seconds")
        if node.slots < 1:
            why = f"slots is {node.slots}: a node without memory for one microbatch cannot take part"
            raise _bad(where, why, "set slots to at least 1, or leave the node out")


def _check_links(profile: Profile) -> None:
    known = {name for node in profile.nodes for name in (node.name, node.location) if name}
    for key, link in (*profile.links.items(), ("local", profile.local)):
        if not 0 < link.bytes_per_s < math.inf:  # a Link's own check lets infinity pass
            raise _bad(f"link {key!r}", f"bytes_per_s is {link.bytes_per_s}, it must be above 0 and finite")
    for key in profile.links:
        source, arrow, target = key.partition("->")
        if not arrow:
            raise _bad(f"link {key!r}", "it has no '->'", 'write it as "from->to", of node names or locations')
        for name in (source, target):
            if name not in known:
                why = f"there is no node or location {name!r}; {nearest(name, known)}"
                raise _bad(f"link {key!r}", why, "correct the link's name, or add the node")


def _bad(where: str, why: str, next: str = "correct this value and run the same command again") -> TalkootError:
    return TalkootError(UNUSABLE, where=where, why=why, next=next)
