"""Lessons and the update of self-distillation, with a policy of a few hundred parameters."""

from __future__ import annotations

import math

import pytest
import torch

from distil_toys import Toy
from talkoot.core.errors import TalkootError
from talkoot.tune.distil.critics import CriticSettings, Feedback, open_critic
from talkoot.tune.distil.critics.critic import Rule
from talkoot.tune.distil.learner import DistilFacts, DistilLearner
from talkoot.tune.distil.lessons import Lesson, context_prompt, prepare, reward_advantages
from talkoot.tune.distil.settings import Distillation
from talkoot.tune.objective.scored import Sample, ScoredGroup
from talkoot.tune.objective.settings import Optimizer, Update
from talkoot.tune.tasks.addition import Addition
from talkoot.tune.tasks.task import Item

TASK = Addition(2)
ITEM = Item(prompt="47+85=", answer="132", solution="7+5+0=12;4+8+1=13;132")
COMPLETIONS = ("7+5+0=12;4+8+1=13;132", "7+5+0=12;4+8+0=12;122", "5+7", "7+5+0=13;")


def toy(seed: int = 0) -> Toy:
    return Toy(TASK.alphabet, seed)


def group(policy: Toy, completions=COMPLETIONS, rewards=(1.0, 0.0, 0.0, 0.0), finish="stop") -> ScoredGroup:
    samples = tuple(
        Sample((*policy.coder.encode(text), *((0,) if finish == "stop" else ())), reward, finish, None, 0.0)
        for text, reward in zip(completions, rewards, strict=True)
    )
    return ScoredGroup(tuple(policy.prompt_ids(ITEM.prompt)), samples, "me", True)


def lessons(policy: Toy, kind: str = "arithmetic") -> tuple[Lesson, ...]:
    return prepare(TASK, policy, open_critic(CriticSettings(kind=kind)), [ITEM], [group(policy)]).lessons


def learner(policy: Toy, rate: float = 1e-2, update: Update | None = None, **settings) -> DistilLearner:
    return DistilLearner(policy, Distillation(**settings), Optimizer(learning_rate=rate), update)


def weights(policy: Toy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_lessons_carry_the_hint_the_reward_and_the_first_wrong_token():
    policy = toy()
    found = prepare(TASK, policy, open_critic(CriticSettings(kind="arithmetic")), [ITEM], [group(policy)])
    assert found.cases == {"reproduced": 1, "corrected": 2, "finished": 1}
    assert found.skipped == {}
    right, forgotten, short, sums = found.lessons
    assert policy.coder.decode(forgotten.hinted) == "7+5+0=12;4+8+1=13;132|47+85="
    assert policy.coder.decode(forgotten.prompt) == "47+85="
    assert [lesson.wrong for lesson in (right, forgotten, short, sums)] == [None, 13, 3, 7]
    assert right.advantage == pytest.approx(math.sqrt(3), rel=1e-3)
    assert sum(lesson.advantage for lesson in found.lessons) == pytest.approx(0, abs=1e-6)


def test_of_a_text_that_was_cut_off_nothing_is_wrong():
    policy = toy()
    cut = group(policy, ["7+5+0=1"], [0.0], "length")
    found = prepare(TASK, policy, open_critic(CriticSettings(kind="arithmetic")), [ITEM], [cut])
    assert found.cases == {"finished": 1}
    assert found.lessons[0].wrong is None


@pytest.mark.parametrize(
    ("feedback", "why"),
    [
        (Feedback(skip="no critic"), "no critic"),
        (Feedback(), "empty feedback"),
        (Feedback(context="It is WRONG."), "feedback outside the vocabulary"),
        (Feedback(context="1" * 193), "feedback too long"),
    ],
)
def test_rollouts_without_a_usable_hint_are_skipped_by_name(feedback: Feedback, why: str):
    policy = toy()
    found = prepare(TASK, policy, Rule(lambda rollout: feedback), [ITEM], [group(policy)])
    assert found.lessons == ()
    assert found.skipped == {why: 4}


def test_a_group_of_one_or_of_equals_has_no_advantage_and_no_nan():
    assert reward_advantages([1.0]) == [0.0]
    assert reward_advantages([0.5, 0.5]) == [0.0, 0.0]
    assert reward_advantages([1.0, 0.0]) == pytest.approx([1.0, -1.0], rel=1e-3)


def test_a_task_without_a_form_of_its_own_gets_the_hint_in_words():
    text = context_prompt(object(), "What is 2 + 2?", "It is 4.")  # type: ignore[arg-type]
    assert text.startswith("What is 2 + 2?")
    assert "It is 4." in text
    assert context_prompt(TASK, "1+2=", "hint") == "hint|1+2="


@pytest.mark.parametrize("name", ["forward", "reverse", "jsd", "pg"])
def test_the_first_update_descends_the_divergence_to_the_hinted_initial_policy(name: str):
    policy = toy()
    study, pupil = lessons(policy), learner(policy, rate=3e-3, divergence=name, top_k=0)
    before = pupil.measure(study)
    first = pupil.update(study)
    assert (first.steps, first.reason) == (1, "")
    assert first.tokens == sum(len(lesson.ids) for lesson in study)
    assert first.advantage == pytest.approx(sum(map(sum, before)) / first.tokens, abs=1e-5)
    for _ in range(30):
        last = pupil.update(study)
    assert last.advantage_size < first.advantage_size
    if name != "pg":
        assert last.loss < 0.8 * first.loss


def test_the_teacher_stays_where_it_was_while_the_student_moves():
    policy = toy()
    study, pupil = lessons(policy), learner(policy)
    initial = weights(policy)
    for _ in range(3):
        pupil.update(study)
    assert not same(weights(policy), initial)
    assert same(policy.initial, initial)
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("name", ["reverse", "pg"])
def test_microbatches_change_nothing_but_the_memory(name: str):
    found = []
    for budget in (1, 130, 10**6):
        policy = toy()
        pupil = learner(policy, rate=1e-3, divergence=name, top_k=5, update=Update(microbatch_tokens=budget))
        policy.calls.clear()
        facts = pupil.update(lessons(policy))
        found.append((facts, weights(policy), max(policy.calls)))
    assert [rows for _, _, rows in found] == [1, 2, 4]
    for facts, tensors, _ in found[1:]:
        assert facts.loss == pytest.approx(found[0][0].loss, rel=1e-5)
        assert facts.grad_norm == pytest.approx(found[0][0].grad_norm, rel=1e-4)
        assert facts.localisation.first_wrong == pytest.approx(found[0][0].localisation.first_wrong, rel=1e-5)
        for mine, other in zip(tensors, found[0][1], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_every_token_counts_the_same_in_a_long_rollout_and_in_a_short_one():
    gradients = []
    for parts in (((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))):
        policy = toy()
        study = lessons(policy)
        total, summed = sum(len(lesson.ids) for lesson in study), None
        for part in parts:
            chosen = [study[number] for number in part]
            losses, _ = learner(policy, divergence="reverse")._losses(chosen)
            share = torch.autograd.grad(losses.sum() / total, policy.parameters())
            summed = share if summed is None else [a + b for a, b in zip(summed, share, strict=True)]
        gradients.append(summed)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_a_resumed_learner_gives_the_same_bits():
    whole = toy()
    study, pupil = lessons(whole), learner(whole)
    for _ in range(2):
        pupil.update(study)
    saved = {name: value.clone() for name, value in pupil.state().items()}
    kept, initial = weights(whole), [value.clone() for value in whole.initial]
    expected = [pupil.update(study) for _ in range(2)]

    resumed = toy(seed=1)
    resumed._put(kept)
    resumed.initial = initial
    again = learner(resumed)
    again.load_state(saved)
    assert [again.update(study) for _ in range(2)] == expected
    assert same(weights(resumed), weights(whole))


def test_blending_with_all_of_the_reward_is_a_plain_policy_gradient():
    policy = toy()
    study = lessons(policy)
    losses, _ = learner(policy, divergence="pg", blend=1.0)._losses(study)
    logp = policy.completion_logits([x.prompt for x in study], [x.ids for x in study]).log_softmax(-1)
    ids = torch.tensor([token for lesson in study for token in lesson.ids])
    advantage = torch.tensor([lesson.advantage for lesson in study for _ in lesson.ids])
    torch.testing.assert_close(losses, -advantage * logp[torch.arange(len(ids)), ids])


def test_half_a_blend_lies_halfway_between_reward_and_hint():
    policy = toy()
    study = lessons(policy)
    hint, half, reward = (learner(policy, divergence="pg", blend=share)._losses(study)[0] for share in (0.0, 0.5, 1.0))
    torch.testing.assert_close(half, (hint + reward) / 2)


def test_nothing_to_learn_from_moves_nothing_and_says_so():
    policy = toy()
    pupil, before = learner(policy), weights(policy)
    facts = pupil.update([])
    assert (facts.steps, facts.reason, facts.loss, facts.tokens) == (0, "nothing to learn from", None, 0)
    assert same(weights(policy), before)


def test_weights_that_are_not_finite_skip_the_step_and_leave_no_nan_in_the_facts():
    policy = toy()
    study, pupil = lessons(policy), learner(policy)
    with torch.no_grad():
        policy.head[0, 0] = math.nan
    facts = pupil.update(study)
    assert (facts.steps, facts.reason, facts.loss, facts.advantage) == (0, "non-finite gradient", None, None)
    assert facts.localisation.first_wrong is None
    assert isinstance(facts, DistilFacts)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"beta": 0.0}, "beta"), ({"top_k": -1}, "top_k"), ({"blend": 0.5}, "blend")],
)
def test_impossible_settings_are_refused_by_name(settings: dict, name: str):
    with pytest.raises(TalkootError) as caught:
        Distillation(**settings)
    assert name in caught.value.where


def test_a_misspelt_divergence_is_refused_when_the_recipe_is_read():
    with pytest.raises(TalkootError, match="reversed"):
        Distillation(divergence="reversed")


def test_distributions_are_compared_at_the_temperature_of_the_rollouts():
    policy = toy()
    study = lessons(policy)
    cool, hot = (learner(policy, update=Update(temperature=heat)).measure(study) for heat in (1.0, 2.0))
    greedy = learner(policy, update=Update(temperature=0.0)).measure(study)
    assert cool == greedy
    assert cool != hot


def test_minibatches_take_turns_and_later_steps_do_not_blur_the_measurement():
    policy, other = toy(), toy()
    study = lessons(policy)
    facts = learner(policy, update=Update(updates_per_round=4, minibatches=2)).update(study)
    assert (facts.steps, facts.lessons) == (4, 4)
    assert facts.tokens == sum(len(lesson.ids) for lesson in study)
    by_hand = learner(other)
    for part in (study[::2], study[1::2], study[::2], study[1::2]):
        by_hand.update(part)
    assert same(weights(policy), weights(other))


def test_what_others_wrote_is_left_out_where_only_the_sampled_token_counts():
    policy = toy()
    own = group(policy)
    other = ScoredGroup(own.prompt, own.samples, "other", False)
    critic = open_critic(CriticSettings(kind="arithmetic"))
    both = prepare(TASK, policy, critic, [ITEM, ITEM], [other, own])
    mine = prepare(TASK, policy, critic, [ITEM, ITEM], [other, own], own_only=True)
    assert (len(both.lessons), both.skipped) == (8, {})
    assert (len(mine.lessons), mine.skipped) == (4, {"not its own": 4})
    assert Distillation(divergence="pg").own_only
    assert not Distillation(divergence="reverse").own_only
