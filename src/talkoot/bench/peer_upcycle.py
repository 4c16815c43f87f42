"""What the upcycling bench measures: experts on real text, fused in every way, by what each way gives every token."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from talkoot.blend.mixture.assemble import assemble
from talkoot.blend.mixture.counting import count
from talkoot.blend.mixture.fitting import fit_gates, randomise_gates
from talkoot.blend.mixture.gates import gates
from talkoot.blend.mixture.model import Mixture
from talkoot.blend.mixture.tuning import tune_gates
from talkoot.blend.recipe import BlendRecipe
from talkoot.blend.router import Router
from talkoot.blend.statistics import Features
from talkoot.blend.statistics import count as count_tokens
from talkoot.blend.train.jobs import Job
from talkoot.blend.train.learner import Learner, from_bytes
from talkoot.blend.train.texts import domain_tokens, general_tokens, prepare_tokenizer
from talkoot.core.keys import Key
from talkoot.core.plain import build
from talkoot.model.decoder import Cache
from talkoot.model.fit import FitSettings
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer

Floats = NDArray[np.float32]
Scores = dict[str, Floats]  # by domain: log-probability of every token of its test windows, (W, T)
TRAINED: tuple[str, ...] = ("mlp", "all")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is the same for all seeds.

    Attributes:
        domains: of the experts; ``general``: further text that the seed saw.
        megabytes: of each corpus.
        model: section of the recipe.
        general_steps, steps: of the seed, on all text; of each expert.
        tune_steps: of gates that are trained, with two experts per token.
        random_rate, refine_rate: learning rates, from random gates on and from closed-form ones, each the best of some
            that were tried; temperature: of both, so that scores of ridge regression, all near 0 or 1, part experts.
        windows: of test text per domain, spread over it.
        counted: windows of training text per domain, spread over it, whose states gates are fitted to; gates on tokens
            count all of it.
        prompt: tokens that a router sees.
    """

    domains: tuple[str, ...] = ("python", "hol-light", "kjv", "postgres", "anarchism")
    general: tuple[str, ...] = ("perl-manual", "elisp", "gcide")
    megabytes: float = 2.5
    model: Mapping[str, object] = {}
    general_steps: int = 1200
    steps: int = 140
    tune_steps: int = 60
    random_rate: float = 5e-3
    refine_rate: float = 1e-3
    temperature: float = 0.1
    windows: int = 28
    counted: int = 192
    prompt: int = 64

    def recipe(self, seed: int, trained: str) -> BlendRecipe:
        """The recipe that a user would write for this."""
        tree = {
            "seed": seed,
            "model": dict(self.model),
            "general": {
                "sources": [f"corpus:{name}" for name in self.general],
                "steps": self.general_steps,
                "megabytes": self.megabytes,
                "domains": True,
            },
            "experts": {"steps": self.steps, "horizon": self.steps, "trained": trained},
            "domains": [
                {"name": name, "source": f"corpus:{name}", "megabytes": self.megabytes} for name in self.domains
            ],
        }
        return build(tree, BlendRecipe, what="the bench's recipe", where="bench upcycle")


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that were made in one way, fused in every way.

    Attributes:
        scores: by method; ``own`` is each domain's own dense expert.
        accuracy: share of tokens, over all blocks, that a gate sends to their domain's expert.
        exact: whether every forced expert is the dense one to the bit; ``difference``: the largest between logits.
        cost: CPU-seconds of the mixture over those of a dense expert: windows, and token by token.
        cpu_s: of fusing and scoring.
    """

    scores: dict[str, Scores]
    accuracy: dict[str, float]
    exact: bool
    difference: float
    cost: dict[str, float]
    cpu_s: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One seed: an arm for each way to train experts, and CPU-seconds of all work."""

    seed: int
    arms: dict[str, Arm]
    cpu_s: float


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work for another process."""

    setting: Setting
    seed: int
    folder: str
    trained: str = "mlp"
    domain: str = ""
    start: bytes = b""
    experts: dict[str, bytes] = {}


def try_all(setting: Setting, seeds: Sequence[int], folder: Path) -> list[Trial]:
    """Every seed's trial, one thread per process, on all processors."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return [_trial(setting, seed, folder / str(seed), pool) for seed in seeds]


def _trial(setting: Setting, seed: int, folder: Path, pool: ProcessPoolExecutor) -> Trial:
    folder.mkdir(parents=True, exist_ok=True)
    ask = {"setting": setting, "seed": seed, "folder": str(folder)}
    start, spent = pool.submit(_general, _Work(**ask)).result()
    asked = [_Work(**ask, trained=t, domain=d, start=start) for t in TRAINED for d in setting.domains]
    made = list(pool.map(_expert, asked))
    experts: dict[str, dict[str, bytes]] = {trained: {} for trained in TRAINED}
    for work, (blob, _) in zip(asked, made, strict=True):
        experts[work.trained][work.domain] = blob
    fused = [_Work(**ask, trained=t, start=start, experts=experts[t]) for t in TRAINED]
    arms = dict(zip(TRAINED, pool.map(_fuse, fused), strict=True))
    spent += sum(cpu_s for _, cpu_s in made) + sum(arm.cpu_s for arm in arms.values())
    return Trial(seed=seed, arms=arms, cpu_s=spent)


# -- training -----------------------------------------------------------------------------------------------------


def _general(work: _Work) -> tuple[bytes, float]:
    torch.set_num_threads(1)
    started = time.process_time()
    recipe, folder = work.setting.recipe(work.seed, "all"), Path(work.folder)
    tokenizer = prepare_tokenizer(recipe, folder)
    for name in work.setting.domains:  # packed once, before others read them
        for part in ("train", "test"):
            domain_tokens(recipe, name, part, tokenizer, folder)
    learner = _learner(work, recipe, tokenizer, "general")
    learner.advance(general_tokens(recipe, tokenizer, folder).tokens, recipe.general.steps)
    return learner.result(), time.process_time() - started


def _expert(work: _Work) -> tuple[bytes, float]:
    torch.set_num_threads(1)
    started = time.process_time()
    recipe, folder = work.setting.recipe(work.seed, work.trained), Path(work.folder)
    tokenizer = prepare_tokenizer(recipe, folder)
    learner = _learner(work, recipe, tokenizer, "expert")
    learner.advance(domain_tokens(recipe, work.domain, "train", tokenizer, folder).tokens, work.setting.steps)
    return learner.result(), time.process_time() - started


def _learner(work: _Work, recipe: BlendRecipe, tokenizer: Tokenizer, kind: str) -> Learner:
    steps = recipe.general.steps if kind == "general" else work.setting.steps
    config = recipe.configs(tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id or 0)["medium"]
    return Learner(
        recipe, Job(name=kind, kind=kind, domain=work.domain, size="medium", steps=steps), config, work.start
    )


# -- fusing -------------------------------------------------------------------------------------------------------


class Fusion:
    """One arm's experts, the seed, and the text to fit and to score on.

    Args:
        work: with weights of the seed and of the experts.
    """

    def __init__(self, work: _Work) -> None:
        self.setting, self.folder = work.setting, Path(work.folder)
        self.recipe = work.setting.recipe(work.seed, work.trained)
        self.tokenizer = prepare_tokenizer(self.recipe, self.folder)
        self.key = Key()
        self.seed = self._stage(work.start)
        self.experts = {name: self._stage(work.experts[name]) for name in work.setting.domains}
        setting, length = work.setting, self.recipe.model.context
        self.tests = {name: self._rows(name, "test", setting.windows, length) for name in self.experts}
        self.texts = {name: self._rows(name, "train", setting.counted, length) for name in self.experts}
        self.trunk = "pinned" if work.trained == "mlp" else "mean-frozen"
        self._counted: dict[tuple[str, str], Any] = {}

    def _stage(self, blob: bytes) -> Stage:
        tokenizer = self.tokenizer
        config = self.recipe.configs(tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id or 0)["medium"]
        stage = Stage(config, 0, config.layer_count)
        stage.load(from_bytes(blob)[0])
        return stage

    def _tokens(self, name: str, part: str) -> NDArray[np.int64]:
        return np.asarray(domain_tokens(self.recipe, name, part, self.tokenizer, self.folder).tokens).astype(np.int64)

    def _rows(self, name: str, part: str, most: int, length: int) -> Tensor:
        """Windows spread over a domain's text, int64 (W, length + 1), without overlap."""
        tokens = self._tokens(name, part)
        there = (len(tokens) - 1) // length
        chosen = np.linspace(0, there - 1, min(most, there)).astype(int)
        rows = [tokens[place * length : (place + 1) * length + 1] for place in chosen]
        return torch.from_numpy(np.stack(rows))

    def mixture(
        self, gate: str, *, trunk: str = "", paper: bool = False, random: int | None = None, **more: Any
    ) -> Mixture:
        """All experts with gates in closed form, or random ones."""
        trunk = trunk or self.trunk
        made = assemble(self.experts, self.seed, gate=gate, trunk=trunk, **more).mixture
        if random is not None:
            randomise_gates(made, random)
        elif gates[gate].reads_states or gates[gate].reads_tokens:
            if (gate, trunk) not in self._counted:
                self._counted[gate, trunk] = {name: self._count(made, name, gate) for name in self.experts}
            fit_gates(made, self._counted[gate, trunk], paper=paper)
        return made

    def _count(self, made: Mixture, name: str, gate: str) -> Any:
        return count(
            made.forced(name),
            [torch.from_numpy(self._tokens(name, "train"))] if gates[gate].reads_tokens else self.texts[name][:, :-1],
            domain=name,
            gate=gate,
            tokenizer=self.tokenizer.digest(),
            contributor=self.key.peer,
            window=self.recipe.model.context,
        )

    def average(self) -> Stage:
        """The mean of all weights."""
        mean = Stage(self.seed.config, 0, self.seed.config.layer_count)
        parts = [expert.tensors() for expert in self.experts.values()]
        mean.load({name: torch.stack([part[name].detach() for part in parts]).mean(0) for name in parts[0]})
        return mean

    def score(self, model: Callable[[str], Stage]) -> Scores:
        """What the model of each domain gives the tokens of its test windows."""
        return {name: log_probs(model(name), rows) for name, rows in self.tests.items()}

    def prompted(self, made: Mixture) -> tuple[Scores, float]:
        """One expert per window, by naive Bayes on its first tokens; and how many windows got their own."""
        features = Features(self.tokenizer, buckets=0)
        known = {n: count_tokens(n, [self._tokens(n, "train").tolist()], features, self.key) for n in self.texts}
        router = Router.fit(known, features, rule="naive-bayes")
        found, right = {}, []
        for name, rows in self.tests.items():
            chosen = [router.route(row[: self.setting.prompt].tolist()).expert for row in rows]
            right += [one == name for one in chosen]
            parts = [log_probs(made.forced(one), row[None]) for one, row in zip(chosen, rows, strict=True)]
            found[name] = np.concatenate(parts)
        return found, statistics.fmean(right)

    def accuracy(self, made: Mixture) -> float:
        """Share of tokens that their best expert is their domain's, over all blocks."""
        right = []
        for number, rows in enumerate(self.tests.values()):
            with torch.no_grad(), made.watched() as seen:
                made(rows[:8, :-1])
            right += [float((one.chosen[:, 0] == number).float().mean()) for one in seen]
        return statistics.fmean(right)

    def batches(self) -> Iterator[Tensor]:
        """For gates that are trained: windows of all domains in turn."""
        every = torch.stack([rows[: min(map(len, self.texts.values()))] for rows in self.texts.values()], 1).flatten(
            0, 1
        )
        for step in range(self.setting.tune_steps):
            yield every[torch.arange(step * 8, step * 8 + 8) % len(every)]


def _fuse(work: _Work) -> Arm:
    torch.set_num_threads(1)
    started = time.process_time()
    fusion = Fusion(work)
    scores, accuracy = {"own": fusion.score(lambda name: fusion.experts[name])}, {}
    scores["seed"] = fusion.score(lambda _: fusion.seed)
    for expert, stage in fusion.experts.items():
        scores[f"expert {expert}"] = fusion.score(lambda _, stage=stage: stage)
    average = fusion.average()
    scores["weight average"] = fusion.score(lambda _: average)
    oracle = fusion.mixture("oracle")
    scores["oracle"] = fusion.score(oracle.forced)
    scores["prompt"], accuracy["prompt"] = fusion.prompted(oracle)
    if work.trained == "all":
        pinned = fusion.mixture("oracle", trunk="pinned")
        scores["oracle, pinned trunk"] = fusion.score(pinned.forced)
    for name, made in _gated(fusion, work.trained == "mlp"):
        scores[name], accuracy[name] = fusion.score(lambda _, made=made: made), fusion.accuracy(made)
    forced = {name: oracle.forced(name) for name in fusion.experts}
    return Arm(
        scores=scores,
        accuracy=accuracy,
        exact=assemble(fusion.experts, fusion.seed, gate="oracle", trunk=fusion.trunk).exact,
        difference=max(_difference(forced[n], fusion.experts[n], rows) for n, rows in fusion.tests.items()),
        cost=_cost(fusion) if work.trained == "mlp" else {},
        cpu_s=time.process_time() - started,
    )


def _gated(fusion: Fusion, trained: bool) -> Iterator[tuple[str, Mixture]]:
    """Every mixture with gates; those whose gates were trained, too, if asked for."""
    yield "random gates", fusion.mixture("token", random=1)
    yield "paper", fusion.mixture("token", paper=True, bias=True)
    yield "token", fusion.mixture("token")
    yield "mean", fusion.mixture("mean")
    yield "naive-bayes", fusion.mixture("naive-bayes")
    yield "bigram", fusion.mixture("bigram")
    if not trained:
        return
    setting, steps = fusion.setting, fusion.setting.tune_steps
    starts = (("random gates", 1, setting.random_rate), ("closed form", None, setting.refine_rate))
    for name, random, rate in starts:
        made = fusion.mixture("token", random=random, top_k=2, temperature=setting.temperature)
        if random is None:
            yield "closed form, two experts", made
        tune_gates(made, fusion.batches(), FitSettings(learning_rate=rate, horizon=steps, warmup=max(1, steps // 10)))
        yield f"trained from {name}", made


@torch.no_grad()
def log_probs(stage: Stage, rows: Tensor) -> Floats:
    """Of every token of rows (W, T + 1) after its first, (W, T)."""
    parts = []
    for some in rows.split(8):
        logits = stage(some[:, :-1]).log_softmax(-1)
        parts.append(logits.gather(-1, some[:, 1:, None])[..., 0].numpy())
    return np.concatenate(parts)


@torch.no_grad()
def _difference(one: Stage, other: Stage, rows: Tensor) -> float:
    return float((one(rows[:8, :-1]) - other(rows[:8, :-1])).abs().max())


# -- cost ---------------------------------------------------------------------------------------------------------


def _cost(fusion: Fusion) -> dict[str, float]:
    """CPU-seconds of a pass through a mixture that visits one expert, over those through a dense expert: for a batch of
    windows of all domains, for one window, and for one token after another."""
    dense, rows = next(iter(fusion.experts.values())), torch.cat([rows[:2, :-1] for rows in fusion.tests.values()])
    found = {}
    for gate in ("token", "mean", "bigram"):
        made = fusion.mixture(gate)
        found[f"{gate}, a batch of windows"] = _ratio(lambda stage: stage(rows), made, dense, 7)
        found[f"{gate}, one window"] = _ratio(lambda stage: stage(rows[:1]), made, dense, 40)
        found[f"{gate}, one token"] = _ratio(lambda stage: _read(stage, rows[:1, :48]), made, dense, 9)
    return found


def _read(stage: Stage, tokens: Tensor) -> None:
    cache = Cache()
    for place in range(tokens.shape[1]):
        stage(tokens[:, place : place + 1], cache)


@torch.no_grad()
def _ratio(work: Callable[[Stage], object], one: Stage, other: Stage, repeats: int) -> float:
    """Of the shortest times, taken in turns: what else the machine does only adds."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(repeats):
        for number, stage in enumerate((one, other)):
            started = time.process_time()
            work(stage)
            times[number].append(time.process_time() - started)
    return min(times[0]) / min(times[1])
