"""Networks with a name: two published tables of links, and random ones on the globe."""

from __future__ import annotations

import math
import random
import tomllib
from functools import cache
from importlib.resources import files
from itertools import combinations

import msgspec

from talkoot.core.errors import TalkootError, nearest
from talkoot.plan.profile import Node, Profile
from talkoot.world.links import Link

TABLES = ("dtfm", "gcp12")  # files of networks_data, which say where they come from
RANDOM = "random:"

# Fitted to gcp12's 60 links above 7 ms, by least squares on logarithms; spreads are standard deviations there.
FIBRE_M_PER_S = 2e8
DETOUR, DETOUR_SPREAD = 1.55, 0.20  # one-way latency over that of the great circle in fibre, after the first 0.5 ms
NEAR_S = 0.0005
RATE_AT_1_S, RATE_POWER, RATE_SPREAD = 1.10e6, -1.067, 0.157  # bytes/s = RATE_AT_1_S * latency_s ** RATE_POWER
MAX_RATE = 0.2425 * 2**30  # where gcp12's short links level off
EARTH_M = 6_371_000.0


def named_network(name: str, nodes: int | None = None) -> Profile:
    """The network of that name, its nodes dealt out in turn over its locations.

    ``gcp12`` and ``dtfm`` are the published tables, ``random:SEED`` is :func:`random_network`, and
    ``random:SEED:unlike`` the same with unlike machines.

    Args:
        nodes: how many machines; one per location when None.

    Raises:
        TalkootError: no such name, or less than one node.
    """
    if name in TABLES:
        return _deal(_table(name), nodes)
    kind, _, rest = name.partition(":")
    seed, _, option = rest.partition(":")
    if f"{kind}:" == RANDOM and seed.isascii() and seed.isdigit() and option in ("", "unlike"):
        return random_network(int(seed), nodes, unlike=option == "unlike")
    raise TalkootError(
        f"there is no network {name!r}",
        where="the name of a network",
        why=nearest(name, (*TABLES, "random:SEED", "random:SEED:unlike")) + ", with a number for SEED",
        next="write one of these names, or the path of a profile with its .toml or .json",
    )


def random_network(seed: int, nodes: int | None = None, *, cities: int = 12, unlike: bool = False) -> Profile:
    """A network between cities drawn at random, with latencies of the globe and bandwidths that fall with them.

    Latency is that of light in fibre along the great circle, times a detour; bandwidth falls with latency as in
    ``gcp12`` up to its plateau; both vary from link to link as much as there. Hosts are gcp12's.

    Args:
        seed: of cities, links and machines; the same for every number of nodes.
        nodes: how many machines; one per city when None.
        cities: how many are drawn, of :func:`all_cities`.
        unlike: machines differ: from half to twice the usual time per layer (log-uniform), and 1 to 4 slots.

    Raises:
        TalkootError: more cities than there are, or less than one city or node.
    """
    known = all_cities()
    if not 1 <= cities <= len(known):
        raise _bad("cities", f"{cities} cities were asked for; between 1 and {len(known)} can be drawn")
    chance = random.Random(f"network {seed}")
    drawn = chance.sample(sorted(known), cities)
    links: dict[str, Link] = {}
    for one, other in combinations(drawn, 2):
        detour = DETOUR * math.exp(chance.gauss(0, DETOUR_SPREAD))
        latency = NEAR_S + max(1.0, detour) * great_circle_m(known[one], known[other]) / FIBRE_M_PER_S
        rate = RATE_AT_1_S * latency**RATE_POWER * math.exp(chance.gauss(0, RATE_SPREAD))
        links[f"{one}->{other}"] = Link(latency_s=latency, bytes_per_s=min(MAX_RATE, rate))
    table = msgspec.structs.replace(
        _table("gcp12"),
        name=f"{RANDOM}{seed}" + (":unlike" if unlike else ""),
        nodes=tuple(Node(name=city, location=city) for city in drawn),
        links=links,
    )
    dealt = _deal(table, nodes)
    if not unlike:
        return dealt
    machines = [
        msgspec.structs.replace(
            node, layer_sample_s=node.layer_sample_s * 2 ** chance.uniform(-1, 1), slots=chance.randint(1, 4)
        )
        for node in dealt.nodes
    ]
    return msgspec.structs.replace(dealt, nodes=tuple(machines))


def all_cities() -> dict[str, tuple[float, float]]:
    """Latitude and longitude in degrees of every city that random networks draw from."""
    rows = (line.split() for line in _read("cities.txt").splitlines() if not line.startswith("#"))
    return {name: (float(latitude), float(longitude)) for name, latitude, longitude in rows}


def great_circle_m(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Metres between two points on the globe, each latitude and longitude in degrees (the haversine formula)."""
    (lat1, lon1), (lat2, lon2) = (tuple(map(math.radians, point)) for point in (one, other))
    half = math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    return 2 * EARTH_M * math.asin(math.sqrt(half))


@cache
def _table(name: str) -> Profile:
    return msgspec.convert(tomllib.loads(_read(f"{name}.toml")), Profile)


def _read(name: str) -> str:
    return files("talkoot.plan").joinpath("networks_data", name).read_text(encoding="utf-8")


def _deal(table: Profile, count: int | None) -> Profile:
    """``count`` nodes, like those of ``table`` in turn; the second in a place is called ``Place-2``."""
    if count is None:
        return table
    if count < 1:
        raise _bad("nodes", f"{count} nodes were asked for, there must be at least 1")
    size = len(table.nodes)
    dealt = [
        msgspec.structs.replace(
            table.nodes[i % size], name=table.nodes[i % size].name + (f"-{turn}" if turn > 1 else "")
        )
        for i, turn in ((i, i // size + 1) for i in range(count))
    ]
    places = {node.location for node in dealt}
    links = {key: link for key, link in table.links.items() if places.issuperset(key.split("->"))}
    return msgspec.structs.replace(table, nodes=tuple(dealt), links=links)


def _bad(where: str, why: str) -> TalkootError:
    return TalkootError("there is no such network", where=where, why=why, next="correct this number")
