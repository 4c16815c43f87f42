"""Who answers what: everybody works it out alone, and it fits together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.tune.assign import assignments, refill

PEERS = ("alder", "birch", "cedar")


def work(split, name, peers=PEERS, seed=1, number=0, prompts=4, samples=8, size=100):
    return assignments(split, seed, number, peers, name, prompts, samples, size)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 50))
@settings(max_examples=50)
def test_together_all_samples_of_a_shared_prompt_are_drawn_once(count: int, samples: int, number: int):
    peers = [f"p{i}" for i in range(count)]
    parts = [work("horizontal", name, peers, number=number, samples=samples) for name in peers]
    drawn = sorted((one.number, sample) for part in parts for one in part for sample in one.samples)
    prompts = {one.number for part in parts for one in part}
    assert len(prompts) == 4
    assert drawn == sorted((prompt, sample) for prompt in prompts for sample in range(samples))


def test_own_prompts_do_not_depend_on_who_else_is_there():
    assert work("vertical", "birch") == work("vertical", "birch", ("birch",))
    assert work("vertical", "birch") != work("vertical", "alder")


def test_every_round_and_every_run_has_other_prompts():
    assert len({work("vertical", "birch", number=n, seed=s)[0] for n in range(5) for s in range(5)}) > 15


def test_a_group_has_all_its_samples_where_prompts_are_ones_own():
    assert all(one.samples == tuple(range(8)) for one in work("vertical", "birch"))


def test_a_small_split_gives_each_prompt_at_most_once():
    assert sorted(one.number for one in work("vertical", "birch", prompts=20, size=7)) == list(range(7))


def test_a_refill_brings_other_prompts_each_time():
    assert refill(1, 0, "birch", 0, 8, 1000) != refill(1, 0, "birch", 1, 8, 1000)
