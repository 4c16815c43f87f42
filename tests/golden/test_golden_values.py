"""Bytes and hashes that must never change by accident: old logs, plans and signatures have to stay readable.

A change here is a change of format. When it is meant, `python tests/golden/test_golden_values.py` writes the new
values, and the commit says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from talkoot.core.codec import encode
from talkoot.core.ids import digest, digest_of_digests
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.model.config import ModelConfig
from talkoot.plan import planners
from talkoot.plan.steps import Seat, View
from talkoot.train.job import Job
from talkoot.train.lead import Lead
from talkoot.train.loop import train
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Model, Recipe, Swarm, Train
from talkoot.train.records import Worked
from talkoot.world.faults import Fault
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import Simulation

FILE = Path(__file__).with_name("values.json")


def receipt() -> Signed:
    key = Key.derived("golden", 1)
    facts = Worked(stage=1, microbatches=(0, 2, 3), sent_bytes=4096, busy_s=0.25)
    task = Task(op="train.step", inputs={"b": "2", "a": "1"}, seed=-7)
    stated = Receipt(
        run="golden",
        generation=2,
        step=9,
        peer=key.peer,
        task=task,
        outputs={"gradient": digest(b"gradient")},
        body=body(facts),
        cost=0.25,
        started=1.5,
        ended=2.75,
        parents=(digest(b"parent"),),
    )
    return sign(stated, key)


def plan() -> bytes:
    speeds = {0: (1.0, 0.5), 1: (0.25,), 2: (1.0, 1.0, 0.1)}
    seats = [Seat(f"peer-{stage}-{i}", stage, speed) for stage, row in speeds.items() for i, speed in enumerate(row)]
    return encode(planners["straight"](View(seats=seats, num_stages=3, num_microbatches=7)))


def rehearsal() -> str:
    """Everything in the log of a rehearsal with a loss, but the software's version."""
    recipe = Recipe(
        seed=5,
        model=Model(depth=4, context=64),
        train=Train(steps=5, microbatches=6, evaluate_every=0, checkpoint_every=2),
        swarm=Swarm(stages=2, replicas=2, speeds=(1.0, 0.5)),
        network=Network(default=Link(latency_s=0.01, jitter_s=0.005, loss=0.1)),
        faults=(Fault(peer="cedar", step=3, phase="backward"), Fault(peer="dogwood", step=3, phase="mix")),
    )
    config = ModelConfig.from_depth(4, 1024)
    log = Log(None)

    async def main(world) -> None:
        await train(Lead(world, Job(recipe=recipe, config=config), cut_stages(config, recipe), log))
        await world.dismiss()

    Simulation(seed=recipe.seed, network=recipe.network).run(main)
    told = [
        (r.op, r.generation, r.step, r.peer, r.started, r.ended, r.outputs, bytes(r.body))
        for r in (entry.receipt for entry in log.entries())
        if r.op != "run.start"
    ]
    log.close()
    return digest(encode(told))


def values() -> dict[str, str]:
    signed = receipt()
    return {
        "identity of a derived key": Key.derived("golden", 1).peer,
        "receipt": signed.raw.hex(),
        "receipt's id": signed.id,
        "signature": signed.signature.hex(),
        "plan": plan().hex(),
        "digest of digests": digest_of_digests([("b", "2"), ("a", "1")]),
        "rehearsal": rehearsal(),
    }


@pytest.mark.parametrize("name", list(values()))
def test_bytes_are_what_they_were(name):
    assert values()[name] == json.loads(FILE.read_text())[name]


def test_an_old_receipt_is_still_understood_and_its_signature_holds():
    stored = json.loads(FILE.read_text())
    opened = Signed(bytes.fromhex(stored["receipt"]), bytes.fromhex(stored["signature"])).open()
    assert (opened.op, opened.step, opened.generation) == ("train.step", 9, 2)
    assert opened.read(Worked).microbatches == (0, 2, 3)


if __name__ == "__main__":
    FILE.write_text(json.dumps(values(), indent=1) + "\n")
    sys.stdout.write(f"wrote {FILE}\n")
