"""What ``bench tune`` measures: learning to add, the speed of generation, a pool against one alone, and memory."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from talkoot.core.fold import Entry, State
from talkoot.core.plain import build
from talkoot.tune.completion import Sampling
from talkoot.tune.evaluate import Evaluation, evaluate
from talkoot.tune.policies.native import NativePolicy
from talkoot.tune.recipe import TuneRecipe
from talkoot.tune.run import run_simulated
from talkoot.tune.tuner import Tuner

# Competent in form, and biased: both carries are forgotten more often than not, so that there is something to find.
HABITS = {"forgotten": 0.7, "last": 0.7}
RARELY = {"forgotten": 0.9, "last": 0.9}  # right answers are so rare that one alone finds few of them
TOKENS = 24  # of a completion, about
PEERS = ("alder", "birch", "cedar", "dogwood")


def recipe(**sections: Any) -> TuneRecipe:
    """The bench's recipe: 0.23 million parameters, 32 problems of 8 samples, with tables merged over its own."""
    tree: dict[str, Any] = {
        "name": "bench",
        "task": "addition:2",
        "model": {"width": 96, "layers": 2, "heads": 4},
        "rollout": {"prompts": 32, "samples": 8},
        "optimizer": {"learning_rate": 1e-4},
        "tune": {"rounds": 30, "evaluate_every": 0, "checkpoint_every": 0},
        "peers": [{"name": PEERS[0]}],
    }
    for key, value in sections.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return build(tree, TuneRecipe, what="the bench's recipe", where="bench")


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    """GRPO from a warmed base.

    Attributes:
        warm_s: CPU-seconds of the supervised base, no part of what follows.
        before, after: held-out scores.
        rewards: of each round.
        seconds: CPU-seconds of each round: generating and scoring, updating.
        generated, trained: tokens over all rounds.
    """

    seed: int
    parameters: int
    warm_s: float
    before: Evaluation
    after: Evaluation
    rewards: list[float]
    seconds: list[tuple[float, float]]
    generated: int
    trained: int

    @property
    def cpu_s(self) -> float:
        """Of all rounds."""
        return sum(map(sum, self.seconds))


def warmed(seed: int, steps: int, habits: dict[str, float] = HABITS) -> tuple[Tuner, float]:
    """A base of this seed, and the CPU-seconds that it took."""
    started = time.process_time()
    warm = {"steps": steps, "habits": habits}
    tuner = Tuner.open(recipe(seed=seed, warm=warm, model={"seed": seed}), PEERS[0])
    return tuner, time.process_time() - started


def learn(tuner: Tuner, warm_s: float, seed: int, rounds: int, problems: int) -> Learning:
    """GRPO, round by round, with the shipping parts; one thread."""

    def score() -> Evaluation:
        return evaluate(
            tuner.policy, tuner.task, "held_out", problems=problems, samples=4, sampling=tuner.sampling, seed=seed
        )

    before, rewards, seconds, generated, trained = score(), [], [], 0, 0
    for number in range(rounds):
        started = time.process_time()
        batch = tuner.generate(number, [tuner.name])
        between = time.process_time()
        learned = tuner.learn(number, batch, [], Counter())
        seconds.append((between - started, time.process_time() - between))
        rewards.append(learned.facts.reward)
        generated += sum(len(one.ids) for group in batch.groups for one in group.completions)
        trained += learned.facts.counts.get("tokens", 0)
    return Learning(
        seed=seed,
        parameters=tuner.size,
        warm_s=warm_s,
        before=before,
        after=score(),
        rewards=rewards,
        seconds=seconds,
        generated=generated,
        trained=trained,
    )


# -- speed ----------------------------------------------------------------------------------------------------


def speeds(tuner: Tuner, folder: Path, repeats: int) -> dict[str, tuple[float, ...]]:
    """Tokens per CPU-second of generation, 256 completions at a time: ours, and transformers' own where it is there.

    All draw from the same weights at temperature 1 and end at the end token.
    """
    policy, task = tuner.policy, tuner.task
    prompts = [policy.prompt_ids(task.item(task.index("train", number)).prompt) for number in range(32)]
    sampling = Sampling(max_new_tokens=tuner.limit)
    found = {"native": _repeat(repeats, lambda draw: _generated(policy, prompts, sampling, draw))}
    policy.export(str(folder))
    try:
        import transformers
    except ImportError:
        return found
    from talkoot.tune.policies.open import open_policy
    from talkoot.tune.policies.spec import ModelSpec

    hf = open_policy(ModelSpec(backend="huggingface", load=str(folder), batch_rows=256))
    found["our Hugging Face back-end"] = _repeat(repeats, lambda draw: _generated(hf, prompts, sampling, draw))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(prompts)  # of equal length

    def plain(draw: int) -> int:
        torch.manual_seed(draw)
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=8,
                max_new_tokens=tuner.limit,
                pad_token_id=1,
            )
        return int((out[:, ids.shape[1] :] != 1).sum()) + len(out)  # pad is the end token: one of them counts

    found["transformers generate"] = _repeat(repeats, plain)
    return found


def _generated(policy: Any, prompts: list[list[int]], sampling: Sampling, draw: int) -> int:
    seeds = [[draw * 10_000 + number * 8 + sample for sample in range(8)] for number in range(len(prompts))]
    answers = policy.generate(prompts, seeds, sampling)
    return sum(len(one.ids) for group in answers for one in group)


def _repeat(repeats: int, work: Callable[[int], int]) -> tuple[float, ...]:
    work(0)
    rates = []
    for draw in range(1, repeats + 1):
        started = time.process_time()
        tokens = work(draw)
        rates.append(tokens / (time.process_time() - started))
    return tuple(rates)


def bound(policy: NativePolicy, rows: int = 256) -> float:
    """Tokens per CPU-second if a token cost its matrix products alone, at the rate that they run here by themselves."""
    shapes = [p.shape for name, p in policy.trained.tensors().items() if p.ndim == 2 and "embed" not in name]
    pairs = [(torch.randn(rows, shape[1]), torch.randn(*shape)) for shape in shapes]
    rates = []
    for _ in range(7):
        started = time.process_time()
        for _ in range(20):
            for x, weight in pairs:
                torch.nn.functional.linear(x, weight)
        rates.append(20 * rows / (time.process_time() - started))
    return statistics.median(rates[2:])


# -- the pool -------------------------------------------------------------------------------------------------


def pooled(base: Path, seed: int, names: tuple[str, ...], rounds: int, own: int, external: int, prompts: int) -> float:
    """Cumulative reward per peer (mean over peers) of a run through the shipping loop, in virtual time.

    Each peer generates ``prompts`` groups of 8 per round, whoever else there is; an update takes ``own`` of them and
    ``external`` of the others' (-1: all).
    """
    which = recipe(
        seed=seed,
        task="addition:2,hard",
        model={"load": str(base)},
        rollout={"prompts": prompts, "samples": 8},
        exchange={"own": own, "external": external},
        correction={"rule": "none"},
        tune={"rounds": rounds},
        peers=[{"name": name} for name in names],
    )
    states: list[State] = []

    def observe(entry: Entry, state: State) -> None:
        states[:] = [state]

    run_simulated(which, None, observe)
    return statistics.fmean(peer.rewards for peer in states[0]["tune"].peers.values())


# -- memory ---------------------------------------------------------------------------------------------------


def memory(folder: Path, rounds: int) -> tuple[list[tuple[int, float]], float]:
    """Resident MB by round of a run of two tiny peers in virtual time, and the slope of its second half, MB per 1,000
    rounds (least squares)."""
    path = folder / "luck.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{n:02d}=", "answer": "[0-9]*[0-4]"}}' for n in range(60)))
    which = recipe(
        task=f"jsonl:{path},regex",
        model={"width": 16, "layers": 1, "heads": 2, "context": 64, "tokenizer": "characters:0123456789="},
        rollout={"prompts": 3, "samples": 6, "max_new_tokens": 12},
        tune={"rounds": rounds, "checkpoint_every": 50},
        peers=[{"name": "alder"}, {"name": "birch", "model": {"seed": 2}}],
    )
    points: list[tuple[int, float]] = []

    def observe(entry: Entry, state: State) -> None:
        done = state["tune"].round
        if entry.receipt.op == "tune.update" and done % 10 == 0 and (not points or points[-1][0] != done):
            points.append((done, resident_mb()))

    run_simulated(which, folder / "run", observe)
    half = [(x, y) for x, y in points if x >= rounds / 2]
    return points, 1000 * statistics.linear_regression([x for x, _ in half], [y for _, y in half]).slope


def resident_mb() -> float:
    """Memory of this process that lies in RAM, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
