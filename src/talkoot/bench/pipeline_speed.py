"""Pipeline throughput: our two-stage pipeline against ``torch.distributed.pipelining`` (1F1B, gloo), same model.

Both run two processes with one thread each on loopback and do the whole of a training step: forward, backward,
global gradient clipping, AdamW. Ours also signs receipts, checks and logs every step. A single process with the same
arithmetic is printed beside them: what a pipeline costs (or gains) on this machine.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import tempfile
from pathlib import Path

from talkoot.bench import peer_pipelining
from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_pipelining import WARM_UP
from talkoot.core.fold import Entry, State
from talkoot.train.recipe import Data, Model, Recipe, Swarm, Train
from talkoot.train.run import run_real

CLAIM = "A pipeline with receipts is as fast as torch.distributed.pipelining"
BAR = 0.9


def recipe(stages: int, steps: int, seed: int) -> Recipe:
    """The measured job: 2.0M parameters, 8 microbatches of 4 x 128 tokens."""
    return Recipe(
        name="pipeline-speed",
        seed=seed,
        data=Data(tokenizer="bpe:1024"),
        model=Model(depth=6, context=128),
        train=Train(steps=steps, microbatches=8, microbatch_size=4, warmup=2, checkpoint_every=0, evaluate_every=0),
        swarm=Swarm(stages=stages, replicas=1),
    )


def measure(options: Options) -> Outcome:
    """Tokens per second of the three, one after the other, repeated; quotes ratios of medians."""
    steps, rounds = (10, 2) if options.quick else (30, max(3, options.seeds))
    contenders = {"talkoot, 2 stages": [], "torch pipelining 1F1B, gloo": [], "one process": []}
    with tempfile.TemporaryDirectory(prefix="talkoot-bench-") as scratch:
        for turn in range(rounds):
            job = recipe(2, steps, turn)
            contenders["talkoot, 2 stages"].append(_ours(job, Path(scratch) / f"ours-{turn}"))
            contenders["torch pipelining 1F1B, gloo"].append(_process(job, peer_pipelining.pipeline, 2))
            contenders["one process"].append(_process(recipe(1, steps, turn), peer_pipelining.single, 1))
    rows = tuple(Row(name=name, values=tuple(values)) for name, values in contenders.items())
    ratios = [a / b for a, b in zip(rows[0].values, rows[1].values, strict=True)]
    ratio = statistics.median(ratios)
    return Outcome(
        name="pipeline-speed",
        claim=CLAIM,
        world="real processes, one thread each",
        unit="training tokens per second",
        rows=rows,
        bars=(Bar(text=f"ours / torch pipelining >= {BAR}", measured=ratio, holds=ratio >= BAR),),
        notes=(
            "ratio: median over rounds of the two measured back to back, "
            f"range {min(ratios):.3f} .. {max(ratios):.3f}; {steps} steps a round, the first {WARM_UP} left out",
        ),
    )


def _ours(job: Recipe, folder: Path) -> float:
    times: list[float] = []

    def observe(entry: Entry, state: State) -> None:
        if entry.receipt.op == "train.commit":
            times.append(entry.receipt.ended)

    if not run_real(job, folder, observe).finished:
        raise KeyboardInterrupt  # the run took the signal; half a measurement is none
    return peer_pipelining.tokens_per_step(job) / peer_pipelining.step_time(times)


def _process(job: Recipe, target, count: int) -> float:
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.SimpleQueue()
    processes = [context.Process(target=target, args=(job, rank, port, results)) for rank in range(count)]
    for process in processes:
        process.start()
    times = results.get()
    for process in processes:
        process.join()
        if process.exitcode:
            raise KeyboardInterrupt
    return peer_pipelining.tokens_per_step(job) / peer_pipelining.step_time(times)
