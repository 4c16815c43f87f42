"""What the simulations of training share: a tiny text, tiny models, one way to run them, and a check of that way."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from talkoot.core.fold import Entry, State
from talkoot.core.log import Log
from talkoot.model.config import ModelConfig
from talkoot.model.huggingface import save_folder
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer
from talkoot.train import records
from talkoot.train.job import Job
from talkoot.train.lead import Lead
from talkoot.train.loop import Result, train
from talkoot.train.prepare import cut_stages, model_config, prepare_tokenizer, prepare_tokens
from talkoot.train.recipe import Data, Model, Recipe, Swarm, Train
from talkoot.world.faults import Fault
from talkoot.world.sim.simulation import Simulation

CONTEXT = 32


class Run(NamedTuple):
    """A finished simulation: its result, its log, and the lead as it was at the end."""

    result: Result
    entries: list[Entry]
    lead: Lead

    def facts(self, op: str, kind: type[Any]) -> list[Any]:
        """Bodies of all receipts of one operation."""
        return [entry.receipt.read(kind) for entry in self.entries if entry.receipt.op == op]

    @property
    def losses(self) -> list[tuple[float, ...]]:
        """Losses by microbatch of the commits that stand, by step."""
        standing: dict[int, tuple[float, ...]] = {}
        for entry in self.entries:
            if entry.receipt.op == "train.commit":
                standing[entry.receipt.step] = entry.receipt.read(records.Committed).losses
        return [standing[step] for step in sorted(standing)]


@cache
def text_folder() -> Path:
    """A folder with a text, its byte tokens, and the tokenizer; made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="talkoot-tests-"))
    lines = [f"{n} sheep and {n * n} goats went over {n % 7} hills; {n % 3} came back.\n" for n in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    recipe = Recipe(data=Data(source=str(folder / "text.txt"), tokenizer="bytes"))
    prepare_tokens(recipe, prepare_tokenizer(recipe, folder), folder)
    return folder


@cache
def model_folder(tied: bool, blocks: int = 2) -> Path:
    """A Hugging Face folder with a model of a few blocks, small enough that a step costs milliseconds."""
    config = ModelConfig.from_depth(blocks, Tokenizer.bytes().vocab_size, tied=tied, bos_id=0, eos_ids=(1,))
    small = {"width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "hidden": 24}
    config = msgspec.structs.replace(config, **small)
    folder = text_folder() / f"{'tied' if tied else 'untied'}-{blocks}"
    tensors = {name: p.detach() for name, p in Stage(config, 0, config.layer_count, seed=11).tensors().items()}
    save_folder(folder, config, tensors, Tokenizer.bytes(), dtype=torch.float32)
    return folder


def tiny(
    stages: int = 2, replicas: int = 2, faults: tuple[Fault, ...] = (), *, tied: bool = False, **train: Any
) -> Recipe:
    """A recipe that a simulation finishes in a fraction of a second; ``train`` overrides the section of that name."""
    defaults: dict[str, Any] = {
        "steps": 5,
        "microbatches": 5,
        "microbatch_size": 1,
        "learning_rate": 3e-3,
        "warmup": 2,
        "clip": 0.5,
        "checkpoint_every": 2,
        "evaluate_every": 0,
        "patience_s": 60.0,
    }
    return Recipe(
        seed=3,
        data=Data(source=str(text_folder() / "text.txt"), tokenizer="bytes"),
        model=Model(load=str(model_folder(tied)), context=CONTEXT, device="cpu"),
        train=Train(**(defaults | train)),
        swarm=Swarm(stages=stages, replicas=replicas),
        faults=faults,
    )


def simulate(
    recipe: Recipe,
    folder: Path | None = None,
    *,
    log: Log | None = None,
    held_out: int = 0,
    observer: Callable[[Entry, State], None] = lambda entry, state: None,
    started: Callable[[Lead, Simulation], None] = lambda lead, simulation: None,
    cut: list[tuple[int, int]] | None = None,
) -> Run:
    """Train in virtual time with real tensors; the log is in memory, snapshots lie in ``folder`` where there is one."""
    tokenizer = prepare_tokenizer(recipe, text_folder())
    config = model_config(recipe, tokenizer)
    tokens = prepare_tokens(recipe, tokenizer, text_folder())
    job = Job(recipe=recipe, config=config, tokens=str(tokens.path), tokens_digest=tokens.digest)
    simulation = Simulation(seed=recipe.seed, network=recipe.network, folder=folder, peer_flops=recipe.swarm.flops)
    open_log = Log(None) if log is None else log  # an empty log is false
    try:

        async def main(world: Any) -> tuple[Result, Lead]:
            stages = cut or cut_stages(config, recipe)
            lead = Lead(world, job, stages, open_log, folder, held_out, tokenizer.digest(), observer)
            started(lead, simulation)
            result = await train(lead)
            await world.dismiss()
            return result, lead

        result, lead = simulation.run(main)
        return Run(result, list(open_log.entries()), lead)
    finally:
        if log is None:
            open_log.close()


def replace(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """The recipe with some values of one section changed."""
    return msgspec.structs.replace(recipe, **{section: msgspec.structs.replace(getattr(recipe, section), **values)})


def test_the_tiny_run_trains_and_ends_with_a_snapshot_of_its_last_step(tmp_path):
    run = simulate(tiny(), tmp_path, held_out=2)
    assert run.result.finished
    assert run.result.step == 5
    assert run.result.held_out is not None
    assert len(run.losses) == 5
    assert sum(run.losses[-1]) < sum(run.losses[0])
    assert run.result.state_hash == run.lead.state["run"].state_hash != ""


__all__ = ["CONTEXT", "Fault", "Run", "model_folder", "replace", "simulate", "text_folder", "tiny"]
