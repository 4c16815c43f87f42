"""What the simulations of training in rounds share: tiny replicas, one way to run them, and a check of that way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from test_train_kit import model_folder, text_folder

from talkoot.core.fold import Entry
from talkoot.core.log import Log
from talkoot.train import records
from talkoot.train.job import Job
from talkoot.train.loop import Result
from talkoot.train.prepare import cut_stages, model_config, prepare_tokenizer, prepare_tokens
from talkoot.train.recipe import Data, Joiner, Mixing, Model, Recipe, Swarm, Train
from talkoot.train.rounds.lead import RoundLead, train_in_rounds
from talkoot.train.rounds.records import Averaged, Rounded
from talkoot.train.verify import Findings, examine
from talkoot.world.faults import Fault
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import Simulation

NAMES = ("alder", "birch", "cedar", "dogwood")
LEASE_S, GRACE_S = 2.5, 5.0  # what a stopped partner may cost a survivor


class Rounds(NamedTuple):
    """A finished simulation: its result, its log, and the lead as it was at the end."""

    result: Result
    entries: list[Entry]
    lead: RoundLead

    def facts(self, op: str, kind: type[Any]) -> list[Any]:
        """Bodies of all receipts of one operation."""
        return [entry.receipt.read(kind) for entry in self.entries if entry.receipt.op == op]

    @property
    def rounds(self) -> list[tuple[str, int, Rounded]]:
        """(Peer, round, its account) of every round that was reported."""
        inner = self.lead.mixing.inner_steps
        found = [entry.receipt for entry in self.entries if entry.receipt.op == "train.round"]
        return [(receipt.peer, receipt.step // inner, receipt.read(Rounded)) for receipt in found]

    @property
    def lost(self) -> list[str]:
        """Names of those who were lost, in order."""
        return [gone.name for gone in self.facts("peer.lost", records.Gone)]

    @property
    def alone(self) -> list[str]:
        """Why exchanges came to nothing."""
        return [why for _, _, facts in self.rounds for why in facts.alone]

    def ends(self) -> dict[int, set[str]]:
        """Digests of the slow weights after each round, over all replicas that reported it."""
        inner, found = self.lead.mixing.inner_steps, dict[int, set[str]]()
        for entry in self.entries:
            if entry.receipt.op == "train.round":
                found.setdefault(entry.receipt.step // inner, set()).add(entry.receipt.outputs["weights"])
        return found


def tiny(
    replicas: int = 4,
    faults: tuple[Fault, ...] = (),
    *,
    rounds: int = 6,
    inner: int = 2,
    rule: str = "noloco",
    joiners: tuple[Joiner, ...] = (),
    mixing: dict[str, Any] | None = None,
    swarm: dict[str, Any] | None = None,
    link: Link | None = None,
    **train: Any,
) -> Recipe:
    """A recipe that a simulation finishes in a fraction of a second; ``train`` overrides the section of that name."""
    defaults: dict[str, Any] = {
        "steps": rounds * inner,
        "microbatches": replicas,
        "microbatch_size": 1,
        "learning_rate": 3e-3,
        "warmup": 2,
        "clip": 0.5,
        "checkpoint_every": 0,
        "evaluate_every": 0,
        "patience_s": 60.0,
    }
    return Recipe(
        seed=3,
        data=Data(source=str(text_folder() / "text.txt"), tokenizer="bytes"),
        model=Model(load=str(model_folder(False, 1)), context=16, device="cpu"),
        train=Train(**(defaults | train)),
        mixing=Mixing(rule=rule, inner_steps=inner, **(mixing or {})),
        swarm=Swarm(**{"stages": 1, "replicas": replicas, "joiners": joiners, "flops": 1e8, **(swarm or {})}),
        network=Network(default=link) if link else Network(),
        faults=faults,
    )


def simulate(
    recipe: Recipe,
    folder: Path | None = None,
    *,
    log: Log | None = None,
    held_out: int = 0,
    observer: Callable[[Entry, Any], None] = lambda entry, state: None,
    started: Callable[[RoundLead, Simulation], None] = lambda lead, simulation: None,
) -> Rounds:
    """Train in virtual time with real tensors; the log is in memory, snapshots lie in ``folder`` where there is one."""
    tokenizer = prepare_tokenizer(recipe, text_folder())
    config = model_config(recipe, tokenizer)
    tokens = prepare_tokens(recipe, tokenizer, text_folder())
    job = Job(
        recipe=recipe, config=config, tokens=str(tokens.path), tokens_digest=tokens.digest, held_out_batches=held_out
    )
    simulation = Simulation(seed=recipe.seed, network=recipe.network, folder=folder, peer_flops=recipe.swarm.flops)
    open_log = Log(None) if log is None else log  # an empty log is false
    try:

        async def main(world: Any) -> tuple[Result, RoundLead]:
            stages = cut_stages(config, recipe)
            lead = RoundLead(world, job, stages, open_log, folder, held_out, tokenizer.digest(), observer)
            started(lead, simulation)
            result = await train_in_rounds(lead)
            await world.dismiss()
            return result, lead

        result, lead = simulation.run(main)
        return Rounds(result, list(open_log.entries()), lead)
    finally:
        if log is None:
            open_log.close()


def check(run: Rounds, *, lost: set[str] | None = None, longest_s: float = LEASE_S + GRACE_S) -> Findings:
    """The run came to its end, the log accounts for it, nobody waited too long, and only ``lost`` were restarted."""
    findings = examine(run.entries)
    assert findings.faults == ()
    assert findings.steps == run.lead.recipe.train.steps
    assert run.result.finished
    assert run.result.state_hash
    assert max(facts.wait_s for _, _, facts in run.rounds) < longest_s
    if lost is not None:
        assert set(run.lost) == lost
    joined = [facts.name for facts in run.facts("peer.join", records.Joined)]
    for name in set(joined):
        assert joined.count(name) <= run.lead.state["run"].sessions + run.lost.count(name)
    return findings


def plain(recipe: Recipe) -> Recipe:
    """The recipe without its faults."""
    return msgspec.structs.replace(recipe, faults=())


MIXING = {
    "noloco": {},
    "noloco-literal": {"overlap": 1},
    "diloco": {},
    "streaming": {"fragments": 2, "overlap": 1},
    "sparseloco": {},
    "none": {},
}


@pytest.mark.parametrize("rule", MIXING)
def test_the_tiny_replicas_train_and_end_with_the_mean_of_all(rule, tmp_path):
    run = simulate(tiny(rule=rule, inner=4, mixing=MIXING[rule]), tmp_path, held_out=2)
    check(run, lost=set())
    assert run.result.step == 24
    (averaged,) = run.facts("train.average", Averaged)
    assert averaged.replicas == 4
    assert averaged.held_out is not None
    first = [facts.loss for _, number, facts in run.rounds if number == 0]
    last = [facts.loss for _, number, facts in run.rounds if number == 5]
    assert len(first) == len(last) == 4
    assert sum(last) < sum(first)


__all__ = ["NAMES", "Fault", "Joiner", "Rounds", "check", "plain", "simulate", "tiny"]
