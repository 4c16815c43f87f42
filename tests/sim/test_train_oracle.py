"""However a run is cut, shared out and disturbed, its bits are those of a plain torch loop on one processor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load as read_safetensors
from test_train_kit import CONTEXT, Run, model_folder, replace, simulate, text_folder, tiny
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.data import Windows
from talkoot.model.huggingface import load_model
from talkoot.train.checkpoint import read_manifest
from talkoot.train.prepare import open_windows
from talkoot.train.recipe import Recipe
from talkoot.train.records import Committed
from talkoot.train.tensors import TensorStage, choose_device

Gradients = dict[str, Tensor]
CLIPS = {False: 0.82, True: 0.95}  # by whether the embedding is tied: amid the gradient norms of those models


def tree_sum(leaves: list[Gradients]) -> Gradients:
    """Sum in the documented order: the left block is the largest power of two below the block's size."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1
    while middle * 2 < len(leaves):
        middle *= 2
    left, right = tree_sum(leaves[:middle]), tree_sum(leaves[middle:])
    return {name: left[name] + right[name] for name in left}


def rate_of(recipe: Recipe, step: int) -> float:
    train = recipe.train
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    progress = min(1.0, (step - train.warmup) / max(1, train.steps - train.warmup))
    return train.learning_rate * (train.final_rate + (1 - train.final_rate) * 0.5 * (1 + math.cos(math.pi * progress)))


class PlainTraining:
    """The whole model in one process, written without a line of talkoot.train but its text and its first weights."""

    def __init__(self, recipe: Recipe, tied: bool) -> None:
        self.recipe, self.train, self.tied = recipe, recipe.train, tied
        self.model = load_model(model_folder(tied))
        self.named = self.model.tensors()
        if tied:  # one tensor in two places
            self.head = self.named.pop("lm_head.weight")
        self.windows: Windows = open_windows(recipe, str(text_folder() / "tokens" / "tokens.bin"))
        matrices = [p for p in self.named.values() if p.ndim >= 2]
        vectors = [p for p in self.named.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            betas=(self.train.beta1, self.train.beta2),
            eps=self.train.epsilon,
            fused=True,
        )
        self.losses: list[tuple[float, ...]] = []
        self.norms: list[float] = []

    def one_microbatch(self, step: int, microbatch: int) -> tuple[float, Gradients]:
        rows = torch.from_numpy(self.windows.train(step, microbatch, self.train.microbatches))
        logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        wanted = dict(self.named) | ({"head": self.head} if self.tied else {})
        gradients = torch.autograd.grad(loss, list(wanted.values()))
        return float(loss.detach()), dict(zip(wanted, gradients, strict=True))

    def step(self, step: int) -> None:
        losses, leaves = zip(*(self.one_microbatch(step, m) for m in range(self.train.microbatches)), strict=True)
        mean = {name: g * (1.0 / self.train.microbatches) for name, g in tree_sum(list(leaves)).items()}
        if self.tied:
            mean["model.embed_tokens.weight"] = mean["model.embed_tokens.weight"] + mean.pop("head")
        norm = math.sqrt(math.fsum(float(torch.linalg.vector_norm(g.double())) ** 2 for g in mean.values()))
        scale = self.train.clip / norm if self.train.clip and norm > self.train.clip else 1.0
        for name, parameter in self.named.items():
            parameter.grad = mean[name] * scale
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(self.recipe, step)
        self.optimizer.step()
        if self.tied:
            with torch.no_grad():
                self.head.copy_(self.named["model.embed_tokens.weight"])
        self.losses.append(losses)
        self.norms.append(norm)


@cache
def plain(tied: bool, microbatches: int, clip: float = 0.5) -> PlainTraining:
    training = PlainTraining(tiny(1, 1, tied=tied, microbatches=microbatches, clip=clip), tied)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(training.train.steps):
        training.step(step)
    torch.set_num_threads(threads)
    return training


def saved_weights(run: Run) -> Mapping[str, Tensor]:
    """Weights in the run's last snapshot."""
    blobs, weights = run.lead.world.blobs, {}
    newest = sorted((run.lead.folder / "checkpoints").iterdir())[-1]
    for blob in (shard.blob for shard in read_manifest(newest).shards):
        weights |= {n.removeprefix("weight/"): t for n, t in read_safetensors(blobs.get(blob)).items()}
    return weights


@pytest.mark.parametrize("microbatches", [3, 5, 8])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (2, 3)])
def test_losses_norms_and_weights_are_bitwise_those_of_a_plain_torch_loop(
    stages, replicas, tied, microbatches, tmp_path
):
    clip = CLIPS[tied]
    oracle = plain(tied, microbatches, clip)
    recipe = tiny(stages, replicas, tied=tied, microbatches=microbatches, clip=clip)
    run = simulate(recipe, tmp_path)
    assert run.losses == oracle.losses
    assert [facts.gradient_norm for facts in run.facts("train.commit", Committed)] == oracle.norms
    weights = saved_weights(run)
    for name, parameter in oracle.named.items():
        assert torch.equal(weights[name], parameter), name
    assert min(oracle.norms) < clip < max(oracle.norms), "the clip must be at work in some steps and not in others"


def test_without_a_clip_the_bits_are_the_plain_loops_too():
    oracle = plain(True, 5, clip=0.0)
    run = simulate(tiny(2, 2, tied=True, clip=0.0))
    assert run.losses == oracle.losses


def test_unequal_speeds_and_a_peer_without_any_microbatch_change_nothing():
    recipe = replace(tiny(2, 3), "swarm", speeds=(1.0, 0.02, 0.5, 0.3, 1.0, 0.01))
    run = simulate(recipe)
    shares = run.facts("train.commit", Committed)[0].paths
    assert len({path[0] for path in shares}) < 3, "some peer must have had nothing to do"
    assert run.losses == plain(False, 5).losses
    assert run.result.state_hash == simulate(tiny(1, 1)).result.state_hash


def test_the_state_hash_does_not_depend_on_the_cut_or_on_the_number_of_replicas():
    hashes = {simulate(tiny(stages, replicas)).result.state_hash for stages in (1, 2, 3, 4) for replicas in (1, 2)}
    assert len(hashes) == 1


def test_the_same_seed_gives_the_same_log_and_another_seed_another():
    first, second = simulate(tiny()), simulate(tiny())
    assert first.result == second.result
    assert [entry.id for entry in first.entries] == [entry.id for entry in second.entries]
    other = simulate(msgspec.structs.replace(tiny(), seed=4))
    assert other.result.state_hash != first.result.state_hash


@pytest.mark.parametrize("host_threads", [1, 2])
def test_the_hosts_thread_count_changes_no_bit(host_threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(host_threads)
        run = simulate(tiny())
    finally:
        torch.set_num_threads(before)
    assert run.losses == plain(False, 5).losses


def test_a_microbatch_of_several_rows_trains_as_one_batch():
    run = simulate(tiny(2, 2, microbatch_size=3))
    facts = run.facts("train.commit", Committed)[0]
    assert facts.tokens == 5 * 3 * CONTEXT
    assert run.losses == simulate(tiny(1, 1, microbatch_size=3)).losses


def test_the_held_out_loss_is_the_plain_mean_over_the_held_out_batches_and_changes_nothing():
    run = simulate(tiny(2, 2), held_out=3)
    oracle = plain(False, 5)
    losses = []
    with torch.no_grad():
        for batch in range(3):
            rows = torch.from_numpy(oracle.windows.held_out(batch))
            logits = oracle.model(rows[:, :-1])
            losses.append(float(F.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))))
    assert run.result.held_out == math.fsum(losses) / 3
    assert run.result.state_hash == simulate(tiny(2, 2)).result.state_hash


@pytest.mark.parametrize("name", ["abacus", "cuda:99"])
def test_a_device_that_does_not_exist_is_refused_with_the_setting_to_change(name):
    with pytest.raises(TalkootError) as caught:
        choose_device(name)
    assert "model.device" in caught.value.where
    assert choose_device("cpu") == torch.device("cpu")


def test_a_saved_state_of_another_model_is_refused_with_the_tensor_that_does_not_fit():
    def stage(first: int, last: int) -> TensorStage:
        recipe = tiny()
        return TensorStage(load_model(model_folder(False)).config, first, last, recipe, plain(False, 5).windows)

    saved, _ = stage(0, 2).save()
    with pytest.raises(TalkootError, match="does not fit") as caught:
        stage(1, 3).load([saved], 0)
    assert "model.layers.1" in caught.value.where
