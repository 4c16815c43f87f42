"""One update of a policy from scored groups: advantages, corrections, microbatches, optimizer steps, facts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from talkoot.tune.corrections import corrections
from talkoot.tune.corrections.rule import Correction, Evidence
from talkoot.tune.objective import algorithms as _presets  # noqa: F401  registers surrogates
from talkoot.tune.objective.advantage import ALONE, EQUAL, Advantages, advantages
from talkoot.tune.objective.batch import Generated, Rows, row_sums
from talkoot.tune.objective.facts import Meter, UpdateFacts, finite, of_groups
from talkoot.tune.objective.kl import divergence
from talkoot.tune.objective.optimiser import PolicyOptimizer, StepFacts
from talkoot.tune.objective.scored import ScoredGroup
from talkoot.tune.objective.settings import Optimizer, Update
from talkoot.tune.objective.surrogate import surrogates
from talkoot.tune.objective.switches import Objective
from talkoot.tune.objective.weights import token_weights
from talkoot.tune.policies.policy import Policy

NOTHING = "nothing to learn from"
FILTERED = "every completion was filtered"


def log_probabilities(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and, without gradient, the entropy of what it was drawn from, in nats, (N,) each.

    Args:
        logits: (N, vocabulary). ids: (N,) int64.
        temperature: at which completions are sampled; 0 counts as 1.
    """
    scaled = logits if temperature in (0.0, 1.0) else logits / temperature
    norm = scaled.logsumexp(-1)
    logp = scaled.gather(-1, ids[:, None]).squeeze(-1) - norm
    with torch.no_grad():
        parts = zip(scaled.split(1024), norm.split(1024), strict=True)  # so that it takes no second logits' memory
        entropy = torch.cat([z - ((x - z[:, None]).exp() * x).sum(-1) for x, z in parts])
    return logp, entropy


@dataclass
class _Round:
    """What one call of :meth:`Learner.update` works on."""

    rows: Rows
    advantages: Advantages
    meter: Meter
    old: dict[int, Tensor]  # by row: log-probabilities when the update began; empty = those of the one step itself
    reference: dict[int, Tensor]  # by row: log-probabilities of the initial policy


class Learner:
    """Moves a policy towards what earned more than its alternatives.

    Args:
        policy: the one that learns; with a divergence from the initial policy it keeps its initial weights from now on.
        objective: what is maximised.
        correction: for completions of other policies (applied to own ones as well: an engine may differ from the
            trainer).
        optimizer: AdamW's settings.
        update: steps per round, and how much is computed at once.

    Attributes:
        optimizer: counts its steps.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        correction: Correction,
        optimizer: Optimizer,
        update: Update | None = None,
    ) -> None:
        self._policy, self._objective, self._knobs = policy, objective, correction
        self._update = update or Update()
        self._surrogate, self._correct = surrogates[objective.surrogate], corrections[correction.rule]
        self.optimizer = PolicyOptimizer(policy.parameters(), optimizer)
        if objective.kl_beta:
            policy.keep_initial()

    def update(self, groups: Sequence[ScoredGroup]) -> UpdateFacts:
        """Learn from these groups. Where nothing can be learned the weights stay as they are, and ``reason`` says why.

        Raises:
            ValueError: a completion without tokens, with log-probabilities missing or not finite, or with a reward that
                is not finite.
            TalkootError: the correction needs ratios per token, and a generator has another tokenizer.
        """
        self.optimizer.clear()
        work = _Round(Rows.of(groups), advantages(self._objective, groups), Meter(self._knobs), {}, {})
        active = self._active(work)
        steps = self._steps(work, active)
        flat = work.advantages.skipped.get(ALONE, 0) + work.advantages.skipped.get(EQUAL, 0)
        losses, done = [loss for loss, _ in steps], [facts for _, facts in steps]
        last = done[-1] if done else None
        told: dict[str, Any] = {
            **of_groups(groups, flat),
            **work.meter.told(),
            "reason": "" if any(f.applied for f in done) else (last.reason if last else NOTHING),
            "steps": len(done),
            "steps_skipped": sum(not facts.applied for facts in done),
            "loss": finite(losses[0]) if losses else None,
            "grad_norm": last.grad_norm if last else None,
            "learning_rate": last.learning_rate if last else None,
            "tokens": work.meter.tokens,
            "skipped": work.advantages.skipped,
        }
        return UpdateFacts(**told)

    def _active(self, work: _Round) -> list[int]:
        """Rows that give a gradient: others need no forward pass."""
        found = work.advantages
        wanted = found.counted & ((found.values != 0) | bool(self._objective.kl_beta))
        return wanted.nonzero().flatten().tolist()

    def _steps(self, work: _Round, active: list[int]) -> list[tuple[float, StepFacts]]:
        if not active:
            return []
        if self._objective.kl_beta:
            with self._policy.frozen():
                work.reference = self._score(work.rows, active)
        if self._update.updates_per_round > 1:
            work.old = self._score(work.rows, active)
        parts, steps = self._update.minibatches, []
        for number in range(self._update.updates_per_round):
            chosen = torch.zeros(len(work.rows.samples), dtype=torch.bool)
            chosen[number % parts :: parts] = True
            mine = [row for row in active if bool(chosen[row])]
            if mine:
                steps.append(self._step(work, mine, chosen, first=number < parts))
        return steps

    @torch.no_grad()
    def _score(self, rows: Rows, active: Sequence[int]) -> dict[int, Tensor]:
        """Log-probabilities of each active row's tokens under the weights as they are."""
        scores: dict[int, Tensor] = {}
        for part in self._parts(rows, active):
            logp, _ = self._forward(rows, part)
            lengths = [len(rows.samples[row].ids) for row in part]
            scores |= zip(part, logp.split(lengths), strict=True)
        return scores

    def _step(self, work: _Round, rows: list[int], chosen: Tensor, first: bool) -> tuple[float, StepFacts]:
        """One optimizer step from these rows; ``chosen``: all of its minibatch, for the denominators."""
        weights = token_weights(self._objective, work.rows.lengths(), work.advantages.counted & chosen)
        total, pulled = 0.0, bool(self._objective.kl_beta)
        for part in self._parts(work.rows, rows):
            loss, moves = self._loss(work, part, weights[part], first)
            loss.backward()
            total, pulled = total + float(loss.detach()), pulled or moves
        if not pulled:  # AdamW would go on by its momentum
            return total, self.optimizer.skip(FILTERED)
        return total, self.optimizer.step()

    def _loss(self, work: _Round, part: list[int], weights: Tensor, first: bool) -> tuple[Tensor, bool]:
        """Loss of a microbatch, and whether anything in it is learned from."""
        objective = self._objective
        logp, entropy = self._forward(work.rows, part)
        said = Generated.of([work.rows.samples[row] for row in part], logp)
        old = torch.cat([work.old[row] for row in part]) if work.old else logp.detach()
        evidence = _evidence(old, said, work.advantages.values[part].to(logp))
        corrected = self._correct(self._knobs, evidence)
        log_ratio = logp - (old if corrected.clip_to == "learner" else said.logp)
        if objective.ratio_level == "sequence":
            log_ratio = (row_sums(log_ratio, said.rows, len(part)) / said.lengths)[said.rows]
        given = corrected.advantages[said.rows]
        value = self._surrogate(objective, log_ratio, logp, given) * corrected.weight
        if objective.kl_beta:
            reference = torch.cat([work.reference[row] for row in part])
            distance = divergence(objective.kl_estimator, logp, reference)
            value = value - objective.kl_beta * distance
            work.meter.add("kl_reference", distance)
        if first:
            work.meter.see([work.rows.peers[row] for row in part], evidence, corrected)
            work.meter.add("entropy", entropy)
        low, high = math.log(max(1 - objective.clip_low, 1e-30)), math.log(1 + objective.clip_high)
        outside = (log_ratio.detach() < low - 1e-6) | (log_ratio.detach() > high + 1e-6)
        work.meter.add("clipped", outside.double())
        moves = bool(((corrected.weight * given) != 0).any())
        return -(value * weights.to(value)[said.rows]).sum(), moves

    def _parts(self, rows: Rows, active: Sequence[int]) -> Iterable[list[int]]:
        return rows.microbatches(active, self._policy.coder.vocab_size, self._update.microbatch_tokens)

    def _forward(self, rows: Rows, part: Sequence[int]) -> tuple[Tensor, Tensor]:
        completions = [rows.samples[row].ids for row in part]
        logits = self._policy.completion_logits([rows.prompts[row] for row in part], completions)
        ids = torch.tensor([token for ids in completions for token in ids], device=logits.device)
        return log_probabilities(logits, ids, self._update.temperature)

    def state(self) -> dict[str, Tensor]:
        """Everything that a resume with the same bits needs beside the policy's own state."""
        return self.optimizer.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` gave; TalkootError when it is of another policy."""
        self.optimizer.load_state(tensors)


@torch.no_grad()
def _evidence(old: Tensor, said: Generated, values: Tensor) -> Evidence:
    unlike = said.unlike[said.rows]
    log_ratio = (old - said.logp).masked_fill(unlike, 0.0)
    count = len(said.lengths)
    apart = row_sums(old, said.rows, count) - said.total
    total = apart.where(said.unlike, row_sums(log_ratio, said.rows, count))
    return Evidence(
        log_ratio=log_ratio,
        total=total,
        unlike=said.unlike,
        lengths=said.lengths,
        rows=said.rows,
        advantages=values,
    )
