"""``talkoot plan`` for replicas that mix after rounds: what that sends, how long it waits, how far they drift apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from talkoot.cli.output import print_table
from talkoot.cli.plan_request import Request, bad
from talkoot.model.config import ModelConfig
from talkoot.plan.exchange import balanced_steps
from talkoot.plan.mixing import MixingOutlook, Mixture, outlook
from talkoot.plan.profile import load_profile, to_network
from talkoot.train.mixing import mixing_rules
from talkoot.train.planned import dump_recipe
from talkoot.train.recipe import Recipe
from talkoot.train.rounds.prospects import mixture_of
from talkoot.train.rounds.replica import share

WITH_REPLICAS = ("network", "nodes", "accept_outliers", "out")  # what of a request makes sense for whole models
WAYS = {
    "pair": "a swap with a random partner",
    "ring": "an all-reduce along a ring",
    "tree": "an all-reduce up and down a tree",
    "direct": "a direct all-reduce",
    "gather": "everything to everybody",
    "none": "nothing",
}


class Mixed(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        microbatches: of all replicas in an inner step.
        kept_bytes: per parameter, of what the rule keeps besides the optimizer: slow weights and its own vectors.
        links: where they are from.
    """

    mixture: Mixture
    outlook: MixingOutlook
    microbatches: int
    kept_bytes: int
    links: str


def mixed(request: Request, recipe: Recipe, config: ModelConfig) -> Mixed:
    """The outlook on a recipe, on its own links or on those of a network with a name.

    Raises:
        TalkootError: a flag that is about pipelines, another number of nodes than replicas, or a recipe that cannot be.
    """
    for name, value in msgspec.structs.asdict(request).items():
        if name not in WITH_REPLICAS and value not in (None, False):
            flag, why = f"--{name.replace('_', '-')}", f"rule {recipe.mixing.rule!r} mixes replicas of the whole model"
            raise bad(flag, f"it is about pipelines; {why}", "leave it out")
    names, network = list(recipe.swarm.peers), None
    if request.network is not None:
        if request.nodes not in (None, len(names)):
            more = f"leave it out, or set swarm.replicas and train.microbatches to {request.nodes}"
            raise bad("--nodes", f"{request.nodes} nodes for {len(names)} replicas", more)
        profile = load_profile(request.network, len(names), accept_outliers=request.accept_outliers)
        network = to_network(profile, names)
    if request.out is not None:
        about = f"# replicas on {request.network or 'the links of the recipe'}\n"
        planned = recipe if network is None else msgspec.structs.replace(recipe, network=network)
        request.out.write_text(about + dump_recipe(planned), encoding="utf-8")
    mixture, rule = mixture_of(recipe, config, network), mixing_rules[recipe.mixing.rule]
    return Mixed(
        mixture=mixture,
        outlook=outlook(mixture),
        microbatches=share(recipe) * len(names),
        kept_bytes=4 * (1 + len(rule.buffers)) if rule.local is True else 0,
        links=request.network or "the recipe's",
    )


def mixing_view(found: Mixed) -> dict[str, Any]:
    """The outlook as plain data; figures that are simulated are so with the recipe's seed."""
    mixture, seen = found.mixture, msgspec.to_builtins(found.outlook)
    del seen["idle"]  # told per peer
    inner_steps = {
        name: balanced_steps(mixture.inner_steps, speed) if mixture.balance else mixture.inner_steps
        for name, speed in mixture.speeds.items()
    }
    spread = seen.pop("spread")
    if spread is not None:
        spread["near_the_limit"] = found.outlook.spread is not None and found.outlook.spread.near_the_limit
    return {
        **seen,
        "links": found.links,
        "wires": list(mixture.wires),
        "inner_steps": inner_steps,
        "simulated": ["round_s", "idle_share", "uneven_idle_share"],
        "spread": spread,
    }


def show_mixing(view: Mapping[str, Any]) -> None:
    """Print the section."""
    sent, ddp = view["sent_bytes_per_inner_step"], view["ddp_sent_bytes_per_step"]
    steps = sorted(set(view["inner_steps"].values()))
    idle, uneven = view["idle_share"], view["uneven_idle_share"]
    rows = [
        ("after every round", WAYS[view["how"]] + (f", as {' and '.join(view['wires'])}" if sent else "")),
        ("inner steps per round", f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}, by speed"),
    ]
    if sent:
        per_round = _size(view["sent_bytes_per_round"])
        rows.append(("sent per replica", f"{per_round} per round, {_size(sent)} per inner step"))
        rows.append(("  without rounds", f"{_size(ddp)} per step, {ddp / sent:,.0f} times as much (ddp, float32)"))
        ring = "" if view["ring_s"] is None else f"; along a ring of all: {view['ring_s']:.3f} s"
        rows.append(("exchange", f"{view['exchange_s']:.3f} s on {view['links']} links{ring}"))
    rows.append(("round", f"{view['round_s']:.2f} s (simulated)"))
    rows.append(("waiting", f"{idle:.1%} of the time; {uneven:.1%} if step times are log-normal, 0.5 (simulated)"))
    if view["spread"] is not None:
        rows += _spread_rows(view["spread"])
    print("\nMixing")
    print_table(rows)
    if view["spread"] is not None and view["spread"]["near_the_limit"]:
        print("CAUTION: that pull is close to its limit; a little more, and replicas fly apart")


def _spread_rows(spread: Mapping[str, Any]) -> list[tuple[str, str]]:
    ratio, factor = spread["ratio"], spread["contraction"]
    apart = "no bound: nothing pulls replicas together"
    if ratio is not None:
        apart = f"{ratio:.2f} times the variance of a round's progress; what there is shrinks to {factor:.0%} a round"
    margin = f"{spread['pull']:g}; stable below {spread['largest_pull']:.3g}, least spread at {spread['best_pull']:.3g}"
    return [("replicas' variance", apart), ("pull", margin)]


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:,.1f} kB"
