"""A real model over three processes: one training step of SmolLM2-135M, split, is the step of the whole model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from smollm2 import INSTALL, smollm2_folder

from talkoot.run.folder import LOG
from talkoot.train.export import export_run
from talkoot.train.recipe import Data, Model, Recipe, Swarm, Train
from talkoot.train.records import Committed
from talkoot.train.run import run_real
from talkoot.train.verify import verify

BOUND = 1e-5


def one_step(model: Path, stages: int, folder: Path) -> Committed:
    """Run one step with ``stages`` processes, export it to ``folder/model``, and return what was committed."""
    recipe = Recipe(
        name="smollm2",
        data=Data(source="bundled:shakespeare"),
        model=Model(load=str(model), context=64),
        train=Train(
            steps=1,
            microbatches=2,
            microbatch_size=1,
            learning_rate=1e-4,
            warmup=0,
            evaluate_every=0,
            evaluate_batches=0,
        ),
        swarm=Swarm(stages=stages, replicas=1),
    )
    seen: list[Committed] = []

    def observe(entry, state) -> None:
        if entry.receipt.op == "train.commit":
            seen.append(entry.receipt.read(Committed))

    result = run_real(recipe, folder, observe)
    assert (result.finished, len(seen)) == (True, 1)
    found = verify(folder / LOG)
    assert (found.steps, found.faults, found.lost) == (1, (), ())
    assert len(found.final["run"].start.stages) == stages
    export_run(folder, folder / "model")
    return seen[0]


def weights(folder: Path):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file.get_tensor(name).float()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_of_smollm2_split_over_three_processes_is_the_unsplit_step():
    model = smollm2_folder()
    if model is None:
        pytest.skip(INSTALL)
    with tempfile.TemporaryDirectory(prefix="talkoot-smollm2-step-") as scratch:  # 4 GB: not for pytest to keep
        whole = one_step(model, 1, Path(scratch) / "whole")
        split = one_step(model, 3, Path(scratch) / "split")
        assert split.losses == pytest.approx(whole.losses, abs=BOUND)
        assert 1.0 < whole.loss < 8.0  # a language model, not noise (a uniform guess costs 10.8)
        assert split.gradient_norm == pytest.approx(whole.gradient_norm, rel=BOUND)
        ours, theirs = dict(weights(Path(scratch) / "split/model")), dict(weights(Path(scratch) / "whole/model"))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).abs().max() <= BOUND, name
        moved = max(float((theirs[name] - before).abs().max()) for name, before in weights(model))
        assert moved > 5e-5  # the step did train
        assert_loads_in_transformers(Path(scratch) / "split/model")


def assert_loads_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]).strip() == "Paris"
