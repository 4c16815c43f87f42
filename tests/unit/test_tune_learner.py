"""The learner: gradients that are right, whatever the batch looks like; steps that say what they did."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.model.stage import Stage
from talkoot.tune.corrections.rule import Correction
from talkoot.tune.objective.learner import FILTERED, NOTHING, Learner, log_probabilities
from talkoot.tune.objective.scored import ScoredGroup
from talkoot.tune.objective.settings import Optimizer, Update
from talkoot.tune.objective.switches import Objective, make_objective
from tune_fakes import TablePolicy, group

NONE = Correction(rule="none")
STILL = Optimizer(learning_rate=1e-12, clip=0)


def unlike_groups(own: TablePolicy, other: TablePolicy, unlike: bool = False) -> list[ScoredGroup]:
    return [
        group(own, [1, 0, 0.5], [3, 2, 5], seed=1),
        group(other, [0, 1], [4, 1], seed=2, peer="birch", own=False, unlike=unlike),
        group(other, [0, 0, 1, 0], [2, 6, 3, 3], seed=3, peer="cedar", own=False),
    ]


def gradients(policy: TablePolicy, groups: list[ScoredGroup], objective: Objective, correction=NONE, update=None):
    """The gradient of the one step, and the facts. Caught where the optimizer would clip it."""
    learner = Learner(policy, objective, correction, STILL, update)
    caught = []
    step = learner.optimizer.step

    def spy():
        caught.append([p.grad.clone() for p in policy.parameters()])
        return step()

    learner.optimizer.step = spy
    facts = learner.update(groups)
    return caught[0], facts


def close(left, right, tolerance=1e-10):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def loss_by_hand(policy, groups, objective, correction, old) -> float:
    """The loss of a batch, written once more with loops over numbers; ``old``: log-probabilities at the round's
    start."""
    rows = [(g, s) for g in groups for s in g.samples]
    total, number = 0.0, 0
    for g in groups:
        mean = sum(s.reward for s in g.samples) / len(g.samples)
        sigma = math.sqrt(sum((s.reward - mean) ** 2 for s in g.samples) / len(g.samples))
        for s in g.samples:
            adv = (s.reward - mean) / (sigma + 1e-4 if objective.adv_scale == "group_std" else 1)
            logits = policy.completion_logits([g.prompt], [s.ids])
            logp = logits.log_softmax(-1)[range(len(s.ids)), list(s.ids)].tolist()
            apart = [a - b for a, b in zip(old[number], s.gen_logp, strict=True)]
            if correction.rule == "ftis" and adv < 0 and abs(sum(apart)) >= correction.gamma:
                adv = 0.0
            mean_ratio = sum(a - b for a, b in zip(logp, old[number], strict=True)) / len(logp)
            for t, (now, before) in enumerate(zip(logp, old[number], strict=True)):
                ratio = math.exp(mean_ratio if objective.ratio_level == "sequence" else now - before)
                clipped = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
                value = min(ratio * adv, clipped * adv)
                if correction.rule == "ftis":
                    value *= min(math.exp(apart[t]), correction.cap)
                weight = {
                    "seq_mean": 1 / len(rows) / len(logp),
                    "token_mean": 1 / sum(len(s.ids) for _, s in rows),
                    "const": 1 / len(rows) / objective.max_length,
                    "seq_sum": 1 / len(rows),
                }[objective.loss_agg]
                total -= weight * value
            number += 1
    return total


@pytest.mark.parametrize("agg", ["seq_mean", "token_mean", "const", "seq_sum"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", ["none", "ftis"])
@torch.no_grad()
def test_the_gradient_is_the_finite_difference_of_the_loss_written_with_loops(agg, level, rule):
    policy, other = TablePolicy(0), TablePolicy(1)
    groups = unlike_groups(policy, other)
    objective = Objective(loss_agg=agg, ratio_level=level, adv_scale="none" if agg == "const" else "group_std")
    correction = Correction(rule=rule, gamma=2.0)
    old = [
        policy.completion_logits([g.prompt], [s.ids]).log_softmax(-1)[range(len(s.ids)), list(s.ids)].tolist()
        for g in groups
        for s in g.samples
    ]
    with torch.enable_grad():
        found, facts = gradients(policy, groups, objective, correction)
    assert facts.loss == pytest.approx(loss_by_hand(policy, groups, objective, correction, old), abs=1e-10)
    if rule == "ftis":
        assert 0 < facts.filtered_by_peer["birch"] + facts.filtered_by_peer["cedar"] < 2
    for parameter, gradient in zip(policy.parameters(), found, strict=True):
        for place in [(0, 1), (1, 3), (2, 2), (4, 0)]:
            kept = float(parameter[place])
            values = []
            for move in (1e-6, -1e-6):
                parameter[place] = kept + move
                values.append(loss_by_hand(policy, groups, objective, correction, old))
            parameter[place] = kept
            assert float(gradient[place]) == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.sampled_from(["seq_mean", "token_mean", "const", "seq_sum"]), st.randoms())
def test_no_split_into_microbatches_no_order_and_no_padding_changes_the_gradient(budget, agg, chance):
    objective, correction = Objective(loss_agg=agg), Correction(rule="ftis", gamma=2.0)
    groups = unlike_groups(TablePolicy(0), TablePolicy(1))
    expected, facts = gradients(TablePolicy(0), groups, objective, correction)
    shuffled = [replace(g, samples=tuple(chance.sample(g.samples, len(g.samples)))) for g in groups]
    chance.shuffle(shuffled)
    for pad in ("left", "right"):
        policy = TablePolicy(0, pad=pad)
        found, told = gradients(policy, shuffled, objective, correction, Update(microbatch_tokens=budget))
        close(found, expected)
        assert told.loss == pytest.approx(facts.loss, abs=1e-12)
        for name in ("entropy", "ratio_median", "ratio_max", "kl_naive", "kl_nonnegative"):
            assert getattr(told, name) == pytest.approx(getattr(facts, name), abs=1e-12)
        assert told.filtered_by_peer == facts.filtered_by_peer


def test_small_microbatches_are_really_small():
    policy = TablePolicy(0)
    gradients(policy, unlike_groups(policy, policy), Objective(), NONE, Update(microbatch_tokens=8))
    assert policy.calls - 9 >= 5  # nine to score the completions; widths 3 to 8


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 0.25, 1]), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["seq_mean", "token_mean", "const", "seq_sum"]),
)
def test_with_ratio_one_all_surrogates_have_the_gradient_of_reinforce_with_a_baseline(rewards, agg):
    if all(len(set(values)) == 1 for values in rewards):
        return
    groups = [group(TablePolicy(0), values, [3, 1, 4], seed=number) for number, values in enumerate(rewards)]
    shared = {"loss_agg": agg, "adv_scale": "none", "baseline": "group_mean", "overlong": "none"}
    reference, _ = gradients(TablePolicy(0), groups, make_objective({"algorithm": "reinforce", **shared}, 8))
    for name in ("grpo", "dr_grpo", "bnpo", "dapo", "cispo"):
        objective = make_objective({"algorithm": name, "dynamic_sampling": False, **shared}, 8)
        close(gradients(TablePolicy(0), groups, objective)[0], reference)
    loo = make_objective({"algorithm": "rloo", **shared, "baseline": "leave_one_out"}, 8)
    close(gradients(TablePolicy(0), groups, loo)[0], [value * 1.5 for value in reference])  # G / (G - 1)
    for rule in ("vis", "tis", "mis", "filter", "ftis", "fvis", "opsm"):
        knobs = Correction(rule=rule)
        close(gradients(TablePolicy(0), groups, make_objective({**shared}, 8), knobs)[0], reference)


def test_sequence_ratios_share_a_gradient_among_the_tokens_of_a_completion():
    """With R = 1 the gradient of exp(mean log R) is the mean over tokens: under a sum per completion, len(a) times it
    is that of the token ratio only where every completion is as long."""
    groups = [group(TablePolicy(0), [1, 0, 0], [4, 4, 4], seed=5)]
    token, _ = gradients(TablePolicy(0), groups, Objective())
    sequence, _ = gradients(TablePolicy(0), groups, make_objective({"algorithm": "gspo"}, 8))
    close(token, sequence)


def test_identical_policies_have_ratio_one_and_divergence_zero():
    _, facts = gradients(TablePolicy(0), unlike_groups(TablePolicy(0), TablePolicy(0)), Objective(), Correction())
    for name in ("ratio_median", "ratio_90", "ratio_99", "ratio_max"):
        assert getattr(facts, name) == pytest.approx(1, abs=1e-9)
    assert facts.kl_naive == pytest.approx(0, abs=1e-9)
    assert facts.kl_nonnegative == pytest.approx(0, abs=1e-9)
    assert facts.above_cap_share == 0
    assert set(facts.filtered_by_peer.values()) == {0.0}


def test_ratios_are_told_before_truncation():
    policy = TablePolicy(0)
    lowered = [
        replace(g, samples=tuple(replace(s, gen_logp=tuple(v - 3.0 for v in s.gen_logp)) for s in g.samples))
        for g in [group(policy, [1, 0], [3, 2])]
    ]
    _, facts = gradients(policy, lowered, Objective(), Correction(rule="tis"))
    assert facts.ratio_median == pytest.approx(math.exp(3))
    assert facts.ratio_max == pytest.approx(math.exp(3))
    assert facts.above_cap_share == 1
    assert facts.kl_naive == pytest.approx(-7.5)  # 9 and 6 nats, and likelier to the learner


def test_unlike_tokenizers_learn_from_whole_texts_and_are_refused_per_token():
    own, other = TablePolicy(0), TablePolicy(1)
    groups = unlike_groups(own, other, unlike=True)
    _, facts = gradients(own, groups, Objective(), Correction(rule="ftis", is_level="sequence"))
    same, _ = gradients(own, unlike_groups(own, other), Objective(), Correction(rule="ftis", is_level="sequence"))
    found, _ = gradients(own, groups, Objective(), Correction(rule="ftis", is_level="sequence"))
    close(found, same)
    assert facts.reason == ""
    with pytest.raises(TalkootError, match="another tokenizer"):
        gradients(own, groups, Objective(), Correction(rule="ftis"))


def test_zeroed_completions_stay_in_the_denominators_and_masked_ones_leave():
    policy = TablePolicy(0)
    near = group(policy, [1, 0, 0], [3, 2, 4], seed=1)
    lost = replace(near.samples[1], gen_logp=(-50.0, -50.0), gen_total=-100.0)
    far = replace(near, samples=(near.samples[0], lost, near.samples[2]))
    without = replace(near, samples=(near.samples[0], replace(near.samples[1], finish="length"), near.samples[2]))
    filtered, _ = gradients(policy, [far], Objective(loss_agg="token_mean"), Correction(rule="filter"))
    masked, _ = gradients(policy, [without], Objective(loss_agg="token_mean", overlong="mask"))
    close([value * 9 / 7 for value in filtered], masked)  # 9 tokens, 2 of them masked


def test_missing_or_broken_log_probabilities_are_refused_with_their_owner():
    policy = TablePolicy(0)
    good = group(policy, [1, 0], [3, 2], peer="birch")
    learner = Learner(policy, Objective(), NONE, STILL)
    for change, word in (
        ({"gen_logp": (-1.0,)}, "1 log-probabilities for 3 tokens"),
        ({"gen_logp": (-1.0, math.nan, -1.0)}, "not finite"),
        ({"gen_total": math.nan}, "not finite"),
        ({"gen_total": -math.inf}, "not finite"),
        ({"ids": (), "gen_logp": ()}, "no token"),
        ({"reward": math.nan}, "not finite"),
    ):
        bad = replace(good, samples=(replace(good.samples[0], **change), good.samples[1]))
        with pytest.raises(ValueError, match=word) as caught:
            learner.update([bad])
        assert "birch" in str(caught.value)


def weights(policy: TablePolicy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def test_nothing_to_learn_from_is_said_and_moves_nothing():
    policy = TablePolicy(0)
    learner = Learner(policy, Objective(), NONE, Optimizer(learning_rate=0.1, weight_decay=0.5))
    learner.update([group(policy, [1, 0], [3, 2])])  # from now on there is momentum
    before = weights(policy)
    for groups in ([], [group(policy, [1, 1], [3, 2])], [group(policy, [0.5], [3])]):
        facts = learner.update(groups)
        assert (facts.reason, facts.steps, facts.loss) == (NOTHING, 0, None)
    assert facts.skipped == {"one completion": 1}
    close(weights(policy), before, 0)


def test_a_batch_that_is_filtered_away_is_said_and_moves_nothing():
    policy, far = TablePolicy(0), TablePolicy(9)
    only = group(far, [0, 0, 1], [6, 6, 6], seed=4, own=False, peer="birch")
    learner = Learner(policy, Objective(overlong="mask"), Correction(rule="filter", gamma=0.0), Optimizer())
    ended = tuple(replace(s, finish="length" if s.reward else "stop") for s in only.samples)
    before = weights(policy)
    facts = learner.update([replace(only, samples=ended)])
    assert (facts.reason, facts.steps_skipped) == (FILTERED, 1)
    assert facts.filtered_by_peer == {"birch": 1.0}
    close(weights(policy), before, 0)


def test_a_gradient_that_is_not_finite_skips_the_step_and_every_fact_stays_finite():
    policy = TablePolicy(0)
    with torch.no_grad():
        policy.before[1, 2] = math.inf
    learner = Learner(policy, Objective(), Correction(), Optimizer())
    clean = group(TablePolicy(0), [1, 0, 0], [3, 2, 6])
    facts = learner.update([clean])
    assert facts.reason == "non-finite gradient"
    assert facts.loss is None
    assert facts.grad_norm is None
    for name, value in msgspec.to_builtins(facts).items():
        assert not isinstance(value, float) or math.isfinite(value), name


def test_facts_count_what_came_in():
    own = group(TablePolicy(0), [1, 0], [3, 5], seed=1, finish=("stop", "length"))
    external = group(TablePolicy(1), [1, 1], [2, 2], seed=2, peer="birch", own=False)
    facts = Learner(TablePolicy(0), Objective(), NONE, STILL).update([own, external])
    assert (facts.own_groups, facts.external_groups, facts.tokens) == (1, 1, 8)
    assert (facts.reward_mean, facts.own_reward_mean, facts.zero_sigma_share) == (0.75, 0.5, 0.5)
    assert facts.reward_std == pytest.approx(math.sqrt(3) / 4)
    assert (facts.length_mean, facts.truncated_share) == (3.0, 0.25)
    assert facts.skipped == {"equal rewards": 1}
    assert 0 < facts.entropy < math.log(5)
    assert facts.grad_norm > 0


def test_later_steps_of_a_round_are_clipped_against_its_start():
    def run(steps: int, clip: float):
        policy = TablePolicy(0)
        groups = [group(policy, [1, 0, 0, 1], [3, 4, 2, 5])]
        objective = Objective(clip_low=clip, clip_high=clip)
        settings = Optimizer(learning_rate=0.2, clip=0)
        return policy, Learner(policy, objective, NONE, settings, Update(updates_per_round=steps)).update(groups)

    narrow, told = run(4, 0.05)
    wide, free = run(4, 0.9)
    assert told.steps == 4
    assert told.clipped_share > 0.3
    assert free.clipped_share < told.clipped_share
    assert not torch.equal(narrow.before, wide.before)
    once, _ = run(1, 0.05)
    assert run(1, 0.05)[1].clipped_share == 0
    first, _ = run(1, 0.9)
    close(weights(once), weights(first), 0)  # with R = 1 no clip acts


def test_minibatches_take_every_completion_once_per_pass():
    policy = TablePolicy(0)
    learner = Learner(policy, Objective(), NONE, Optimizer(), Update(updates_per_round=4, minibatches=2))
    facts = learner.update([group(policy, [1, 0, 0, 1], [3, 4, 2, 5])])
    assert (facts.steps, facts.tokens) == (4, 14)


def test_the_divergence_from_the_initial_policy_pulls_back():
    policy = TablePolicy(0)
    learner = Learner(policy, Objective(kl_beta=0.5), NONE, Optimizer(learning_rate=0.05))
    groups = [group(policy, [1, 0, 0, 1], [3, 4, 2, 5])]
    start = weights(policy)
    first = learner.update(groups)
    assert first.kl_reference == pytest.approx(0, abs=1e-12)
    free = TablePolicy(0)
    alone = Learner(free, Objective(), NONE, Optimizer(learning_rate=0.05))
    alone.update(groups)
    for _ in range(60):
        told = learner.update(groups)
        alone.update(groups)
    assert told.kl_reference > 1e-3

    def distance(p: TablePolicy) -> float:
        return sum(float((a - b).square().sum()) for a, b in zip(weights(p), start, strict=True))

    assert distance(policy) < 0.7 * distance(free)


def test_flat_groups_keep_their_divergence_unless_they_are_sampled_away():
    for dynamic, reason in ((False, ""), (True, NOTHING)):
        policy = TablePolicy(0)
        learner = Learner(policy, Objective(kl_beta=0.1, dynamic_sampling=dynamic), NONE, Optimizer())
        with torch.no_grad():
            policy.before += torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert learner.update([group(policy, [1, 1], [3, 2])]).reason == reason


def test_a_resume_gives_the_same_bits():
    def rounds(policy, learner, numbers):
        for number in numbers:
            learner.update([group(TablePolicy(3), [1, 0, 0, 1], [3, 4, 2, 5], seed=number)])

    settings = (Objective(), Correction(), Optimizer(learning_rate=0.05, warmup=3), Update(updates_per_round=2))
    policy = TablePolicy(0)
    learner = Learner(policy, *settings)
    rounds(policy, learner, range(3))
    twin = TablePolicy(0)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), policy.parameters(), strict=True):
            mine.copy_(theirs)
    resumed = Learner(twin, *settings)
    resumed.load_state(learner.state())
    rounds(policy, learner, range(3, 6))
    rounds(twin, resumed, range(3, 6))
    close(weights(policy), weights(twin), 0)


def test_entropy_and_log_probabilities_equal_the_definition_at_the_sampling_temperature():
    logits = torch.randn(2500, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.arange(2500) % 7
    for temperature, divisor in ((0.5, 0.5), (0.0, 1.0), (1.0, 1.0)):
        logp, entropy = log_probabilities(logits, ids, temperature)
        full = (logits / divisor).log_softmax(-1)
        torch.testing.assert_close(logp, full[range(2500), ids])
        torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))


class StagePolicy(TablePolicy):
    """A small decoder, rows padded on the right."""

    def __init__(self) -> None:
        super().__init__(vocab_size=12)
        shape = ModelConfig(vocab_size=12, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, hidden=32)
        self.stage = Stage(shape, 0, shape.layer_count, seed=0)

    def parameters(self):
        return list(self.stage.tensors().values())

    def completion_logits(self, prompts, completions):
        texts = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        width = max(map(len, texts))
        logits = self.stage(torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]))
        parts = zip(logits, prompts, completions, strict=True)
        return torch.cat([row[len(p) - 1 : len(p) - 1 + len(c)] for row, p, c in parts])


def test_a_decoder_learns_to_prefer_what_was_rewarded():
    policy = StagePolicy()
    learner = Learner(policy, Objective(), Correction(), Optimizer(learning_rate=3e-3))
    fixed = group(policy, [1, 0, 0, 0], [4, 4, 4, 4], seed=3)

    def likelihood() -> list[float]:
        ids = [s.ids for s in fixed.samples]
        with torch.no_grad():
            logits = policy.completion_logits([fixed.prompt] * 4, ids)
            logp, _ = log_probabilities(logits, torch.tensor([t for row in ids for t in row]), 1.0)
        return logp.view(4, 4).sum(-1).tolist()

    before = likelihood()
    for _ in range(10):
        facts = learner.update([fixed])
    after = likelihood()
    assert facts.reason == ""
    assert after[0] > before[0] + 1
    assert max(after[1:]) < after[0]
