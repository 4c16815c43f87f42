"""A peer that lies: whatever it sends, the others drop it under a reason, and learn on from what is sound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from test_tune_kit import recipe, run

from talkoot.run.records import Warned
from talkoot.tune import peer
from talkoot.tune.completion import Completion, Group, PromptRef
from talkoot.tune.records import Generated

Change = Callable[[Generated, list[Group]], tuple[Generated, list[Group]]]


def each(change: Callable[[Completion], Completion]) -> Change:
    """The same change of every completion, and an account that fits it."""

    def changed(facts: Generated, groups: list[Group]) -> tuple[Generated, list[Group]]:
        made = [Group(g.prompt, g.samples, tuple(map(change, g.completions))) for g in groups]
        lengths = tuple(tuple(len(c.ids) for c in g.completions) for g in made)
        stopped = tuple(tuple(c.finish == "stop" for c in g.completions) for g in made)
        return msgspec.structs.replace(facts, lengths=lengths, stopped=stopped), made

    return changed


def account(**changes: Any) -> Change:
    return lambda facts, groups: (msgspec.structs.replace(facts, **changes), groups)


def elsewhere(facts: Generated, groups: list[Group]) -> tuple[Generated, list[Group]]:
    """Prompts that the task does not have."""
    prompts = tuple(10**9 + number for number in range(len(groups)))
    made = [
        Group(PromptRef(g.prompt.task, index), g.samples, g.completions)
        for index, g in zip(prompts, groups, strict=True)
    ]
    return msgspec.structs.replace(facts, prompts=prompts), made


LIES: dict[str, tuple[Change, str]] = {
    "a log-probability that is no number": (
        each(lambda c: Completion(c.ids, (math.nan, *c.logp[1:]), c.finish)),
        "not sane",
    ),
    "a probability above one": (each(lambda c: Completion(c.ids, (0.5, *c.logp[1:]), c.finish)), "not sane"),
    "a token outside the vocabulary": (each(lambda c: Completion((10**6, *c.ids[1:]), c.logp, c.finish)), "not sane"),
    "an end that is none": (
        each(lambda c: Completion(c.ids, c.logp, "stop" if c.finish == "length" else "length")),
        "not sane",
    ),
    "too long a completion": (each(lambda c: Completion(c.ids * 20, c.logp * 20, c.finish)), "too long"),
    "another tokenizer": (account(tokenizer="f" * 64), "another tokenizer"),
    "another task": (account(task="e" * 64), "another task"),
    "prompts that do not exist": (elsewhere, "unknown prompt"),
    "the same prompt three times": (account(prompts=(0, 0, 0)), "duplicate"),
    "lengths that do not fit": (account(lengths=((1,) * 6,) * 3), "length mismatch"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_dropped_with_its_reason_and_the_honest_one_learns_on(monkeypatch, name):
    change, reason = LIES[name]
    honest = peer.pack

    def pack(world, step, facts, groups, texts, started):
        if world.name == "birch":
            facts, groups = change(facts, groups)
        return honest(world, step, facts, groups, texts, started)

    monkeypatch.setattr(peer, "pack", pack)
    done = run(recipe(exchange={"wait_s": 2}))
    alder = done.updates("alder")
    assert [update.round for update in alder] == list(range(4))
    assert all(update.solo for update in alder)
    assert all(reason in update.rejected for update in alder), [dict(update.rejected) for update in alder]
    assert all(math.isfinite(value) for update in alder for value in update.learned.values())


def test_a_lie_about_single_completions_costs_those_alone(monkeypatch):
    honest = peer.pack

    def pack(world, step, facts, groups, texts, started):
        if world.name == "birch":
            first = groups[0].completions[0]
            broken = Completion(first.ids, (math.inf, *first.logp[1:]), first.finish)
            groups = [Group(groups[0].prompt, groups[0].samples, (broken, *groups[0].completions[1:])), *groups[1:]]
        return honest(world, step, facts, groups, texts, started)

    monkeypatch.setattr(peer, "pack", pack)
    done = run(recipe())
    assert all(dict(update.rejected) == {"not sane": 1} for update in done.updates("alder"))
    assert not any(update.solo for update in done.updates("alder"))


def test_a_record_sent_twice_counts_once(monkeypatch):
    honest = peer.TunePeer._publish

    async def publish(self, signed, frames):
        await honest(self, signed, frames)
        return await honest(self, signed, frames)

    monkeypatch.setattr(peer.TunePeer, "_publish", publish)
    done = run(recipe())
    plain = done.hashes
    monkeypatch.setattr(peer.TunePeer, "_publish", honest)
    assert run(recipe()).hashes == plain
    assert done.rejected.keys() == {"replayed"}


def test_equal_rewards_are_a_named_skip_and_no_silent_zero_loss():
    done = run(
        recipe(task="addition:1", model={"tokenizer": "characters"}, rollout={"max_new_tokens": 4}, tune={"rounds": 8})
    )
    assert all(update.reason == "nothing to learn from: equal rewards" for update in done.updates("alder"))
    assert all("loss" not in update.learned for update in done.updates("alder"))
    assert done.updates("alder")[-1].version == 0
    warnings = [warned.text for warned in done.facts("run.warning", Warned)]
    assert len(warnings) == 2
    assert all(
        "has learned nothing for 5 rounds: nothing to learn from: equal rewards (reward 0.00" in text
        for text in warnings
    )


def test_a_report_of_somebody_elses_round_gets_a_peer_expelled(monkeypatch):
    honest, told = peer.sign, []

    def sign(receipt, key):
        if receipt.op == "tune.update" and receipt.step == 1 and not told:
            told.append(receipt.peer)
            receipt = msgspec.structs.replace(receipt, task=msgspec.structs.replace(receipt.task, op="tune.generate"))
        return honest(receipt, key)

    monkeypatch.setattr(peer, "sign", sign)
    done = run(recipe(tune={"rounds": 8}))
    assert done.result.finished
    assert [entry.receipt.op for entry in done.entries].count("peer.lost") == 1


def test_a_peer_that_keeps_lying_to_the_lead_is_given_up_and_the_others_go_on(monkeypatch):
    honest = peer.pack

    def pack(world, step, facts, groups, texts, started):
        if world.name == "birch":
            facts = msgspec.structs.replace(facts, round=7_000)
        return honest(world, step, facts, groups, texts, started)

    monkeypatch.setattr(peer, "pack", pack)
    done = run(recipe(tune={"rounds": 300}))
    assert [update.round for update in done.updates("alder")] == list(range(300))
    assert done.updates("birch") == []
    assert done.result.finished
    assert any("birch is given up" in warned.text for warned in done.facts("run.warning", Warned))
    assert sum(done.tuned.peers["alder"].rejected.values()) > 0
