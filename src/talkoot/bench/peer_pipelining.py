"""The contender: the same model and step under ``torch.distributed.pipelining``, and in a single process."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from talkoot.train.recipe import Recipe

WARM_UP = 3


def tokens_per_step(job: Recipe) -> int:
    """Training tokens in one step."""
    return job.train.microbatches * job.train.microbatch_size * job.model.context


def step_time(times: Sequence[float]) -> float:
    """Median seconds between consecutive ends of steps, warm-up left out."""
    return statistics.median(b - a for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False))


def _batch(job: Recipe, vocabulary: int, step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(step)
    rows = job.train.microbatches * job.train.microbatch_size
    return torch.randint(vocabulary, (rows, job.model.context + 1), generator=generator)


def _loss(logits: Any, targets: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def _optimizer(job: Recipe, module: Any) -> Any:
    import torch

    train = job.train
    return torch.optim.AdamW(
        module.parameters(),
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=True,
    )


def pipeline(job: Recipe, rank: int, port: int, results: Any) -> None:
    """Body of one of two processes: Schedule1F1B over gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from talkoot.model.stage import Stage
    from talkoot.train.prepare import cut_stages, model_config

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    config = model_config(job)
    first, last = cut_stages(config, job)[rank]
    module = Stage(config, first, last, seed=job.seed)
    optimizer = _optimizer(job, module)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.train.microbatches, loss_fn=_loss)
    times = []
    for step in range(job.train.steps):
        batch = _batch(job, config.vocab_size, step)
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch[:, 1:], losses=[])
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        square = sum(gradient.square().sum() for gradient in gradients)
        dist.all_reduce(square)  # the clip needs the whole model's norm
        scale = job.train.clip / max(float(square) ** 0.5, job.train.clip)
        for gradient in gradients:
            gradient.mul_(scale)
        optimizer.step()
        times.append(time.time())
    if rank == 0:
        results.put(times)
    dist.destroy_process_group()


def single(job: Recipe, rank: int, port: int, results: Any) -> None:
    """Body of the single process: the same step without a pipeline."""
    import torch

    from talkoot.model.stage import Stage
    from talkoot.train.prepare import model_config

    torch.set_num_threads(1)
    config = model_config(job)
    module = Stage(config, 0, config.layer_count, seed=job.seed)
    optimizer = _optimizer(job, module)
    count, times = job.train.microbatches, []
    for step in range(job.train.steps):
        optimizer.zero_grad(set_to_none=True)
        for part in _batch(job, config.vocab_size, step).chunk(count):
            (_loss(module(part[:, :-1]), part[:, 1:]) / count).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.train.clip)
        optimizer.step()
        times.append(time.time())
    results.put(times)
