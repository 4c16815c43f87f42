"""The demo: Shakespeare, a small decoder, two stages times two replicas, unequal peers, one of them killed."""

from __future__ import annotations

from talkoot.train.recipe import Data, Model, Recipe, Swarm, Train
from talkoot.world.faults import Fault
from talkoot.world.links import Link, Network

VICTIM = "birch"
VICTIM_STEP_SHARE = 0.4  # of all steps; the victim dies in the middle of a backward pass


def demo(*, seed: int = 7, steps: int = 450) -> Recipe:
    """The recipe behind ``talkoot demo``.

    Args:
        seed: of everything random.
        steps: optimizer steps; the loss bound of the demo's table is meant for the default.
    """
    return Recipe(
        name="demo",
        seed=seed,
        data=Data(source="bundled:shakespeare", tokenizer="bpe:1024"),
        model=Model(depth=4, context=64),
        train=Train(
            steps=steps,
            microbatches=8,
            microbatch_size=4,
            learning_rate=4e-3,
            warmup=min(20, steps // 5),
            checkpoint_every=max(1, steps // 3),
            evaluate_every=max(1, steps // 6),
            evaluate_batches=16,
        ),
        swarm=Swarm(stages=2, replicas=2, speeds=(1.0, 0.6, 1.0, 0.8)),
        network=Network(default=Link(latency_s=0.02, bytes_per_s=12.5e6, jitter_s=0.004)),
        faults=(Fault(peer=VICTIM, step=int(steps * VICTIM_STEP_SHARE), phase="backward", kind="kill"),),
    )
