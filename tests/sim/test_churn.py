"""Churn in virtual time: what the bench's accounts say about the shipping code, and iterations that must not hang."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import msgspec
import pytest

from talkoot.bench.churn import GREEDY, OURS, RESTART, STRAIGHT, WEIGHTED
from talkoot.bench.peer_churn import Contender, Iteration, Size, draw, recipe_of, run
from talkoot.plan.dispatch import Queues
from talkoot.train.records import Routed
from talkoot.train.rehearse import rehearse

SIZE, DRAW = Size(), draw(0, 3)


@cache
def calm(contender: Contender) -> list[Iteration]:
    return run(DRAW, SIZE, contender)


@cache
def shaken(contender: Contender) -> list[Iteration]:
    return run(DRAW, SIZE, contender, rate=0.2, undisturbed_s=fmean(one.seconds for one in calm(contender)))


@pytest.mark.parametrize("contender", [OURS, WEIGHTED, GREEDY, STRAIGHT], ids=lambda one: one.planner)
def test_without_crashes_every_second_of_computing_is_useful_and_iterations_are_alike(contender):
    for one in calm(contender):
        assert one.repeated_s == pytest.approx(0, abs=1e-6)
        assert one.died_s == one.reopened_s == 0
        assert 0 < one.mixing_s < one.seconds
        assert one.seconds == pytest.approx(calm(contender)[0].seconds, rel=0.02)


@pytest.mark.parametrize("contender", [OURS, RESTART, WEIGHTED, STRAIGHT], ids=lambda one: one.name)
def test_all_contenders_lose_the_same_relays(contender):
    expected = sorted(crash.name for each in DRAW.crashes(0.2) for crash in each)
    assert len(expected) >= 4
    assert sorted(name for one in shaken(contender) for name in one.lost) == expected


def test_repair_repeats_nothing_but_what_was_lost_and_others_more():
    repaired, redone, restarted = (
        {field: fmean(getattr(one, field) for one in shaken(contender)) for field in Iteration.__struct_fields__[:6]}
        for contender in (OURS, msgspec.structs.replace(OURS, name="x", repair="redo"), RESTART)
    )
    assert repaired["repeated_s"] == pytest.approx(0, abs=1e-6)
    assert repaired["died_s"] > 0
    assert redone["repeated_s"] > 0.5
    assert restarted["repeated_s"] > redone["repeated_s"]
    assert repaired["seconds"] < restarted["seconds"]


def test_spans_tell_the_iteration_lost_work_included():
    for one in shaken(OURS):
        computed = sum(span.end_s - span.start_s for span in one.spans)
        assert computed == pytest.approx(one.useful_s + one.died_s + one.repeated_s)
        assert all(0 <= span.start_s <= span.end_s <= one.seconds for span in one.spans)


def test_counts_of_negotiated_lanes_are_judged_by_what_an_iteration_really_takes():
    recipe, views = recipe_of(DRAW, SIZE, OURS), []
    found = rehearse(recipe, SIZE.config, at_commit=lambda lead, _: views.append(lead.view(recipe.train.microbatches)))
    (routed,) = [entry.receipt.read(Routed) for entry in found.entries if entry.receipt.op == "train.routes"]
    seats = {seat.name: seat for seat in views[0].seats}
    queues = Queues(views[0], [[seats[name] for name in route.peers] for route in routed.routes])
    predicted = queues.seconds([route.count for route in routed.routes])
    assert calm(OURS)[0].seconds - calm(OURS)[0].mixing_s == pytest.approx(predicted, rel=0.02)


def test_microbatches_that_start_again_reach_peers_that_were_mixing_already():
    """Whoever had done all its work and waits for its group has to leave the mixing, or both wait for ever."""
    size, machines = Size(blocks=1, samples=8, context=1024), draw(1, 3)
    undisturbed = fmean(one.seconds for one in run(machines, size, STRAIGHT))
    assert len(run(machines, size, STRAIGHT, rate=0.4, undisturbed_s=undisturbed)) == 3
