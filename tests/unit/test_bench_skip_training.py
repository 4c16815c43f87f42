"""The skip-training bench: balanced paths, honest time, bars that the worst seed decides."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.bench import skip_training
from talkoot.bench.outcome import Options
from talkoot.bench.peer_layer_orders import Arm, Setting, Trained, balanced_paths, losses_by_depth, orders_of, train
from talkoot.bench.skip_training import FULL, SAME_STEPS, SKIP
from talkoot.model.stage import Stage
from talkoot.plan.problem import Rules, path_violations

ARMS = (SKIP, FULL, SAME_STEPS)
SMALL = Setting(stages=4, width=32, context=16, microbatches=6, held_out_batches=1, points=3)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@settings(max_examples=60)
@given(st.integers(2, 9), st.data())
def test_paths_visit_every_stage_evenly_and_keep_the_rules(stages, data):
    arm = Arm(name="x", visits=data.draw(st.integers(max(2, stages - 2), stages)), swaps=data.draw(st.booleans()))
    microbatches = data.draw(st.integers(1, 30))
    paths = balanced_paths(random.Random(data.draw(st.integers(0, 99))), arm, stages, microbatches)
    assert len(paths) == microbatches
    for path in paths:
        assert path[0] == 0
        assert path_violations(path[1:], Rules(visits=arm.visits)) == []
        assert arm.swaps or path == sorted(path)
    counts = Counter(stage for path in paths for stage in path[1:])
    visits = [counts[stage] for stage in range(1, stages)]
    assert max(visits) - min(visits) <= (0 if microbatches * (arm.visits - 1) % (stages - 1) == 0 else 1)


def test_every_choice_of_stages_is_equally_likely_and_swaps_happen():
    chance, arm = random.Random(1), Arm(name="x", visits=4, swaps=True)
    paths = [path for _ in range(400) for path in balanced_paths(chance, arm, 6, 5)]
    sets = Counter(tuple(sorted(path)) for path in paths)
    assert len(sets) == 10
    assert max(sets.values()) < 1.4 * min(sets.values())
    assert {(0, 2, 1, 3), (0, 1, 3, 2), (0, 1, 2, 3)} <= {tuple(path) for path in paths}
    assert 0.2 < sum(path != sorted(path) for path in paths) / len(paths) < 0.8


def test_every_tenth_step_runs_all_layers_and_the_others_two_thirds():
    orders = [orders_of(Setting(), SKIP, seed=0, step=step) for step in range(30)]
    for step, all_orders in enumerate(orders):
        assert {len(order) for order in all_orders} == ({8} if step % 10 == 9 else {6})
    assert orders[0] != orders[1], "paths are drawn anew in each step"
    assert orders == [orders_of(Setting(), SKIP, seed=0, step=step) for step in range(30)]
    assert all(set(orders_of(Setting(), FULL, 0, step)) == {tuple(range(8))} for step in range(3))


def test_training_is_repeatable_takes_the_time_of_its_steps_and_learns():
    arm = Arm(name="x", visits=3, full_every=4, learning_rate=0.01)
    first = train(SMALL, arm, 12, 3, lambda full: 100.0 if full else 10.0)
    again = train(SMALL, arm, 12, 3, lambda full: 100.0 if full else 10.0)
    assert first == again
    assert [seconds for seconds, _ in first.curve] == [130.0, 260.0, 390.0]
    assert first.curve[-1][1] == first.full == first.by_depth[4]
    assert first.curve[-1][1] < first.curve[0][1] < 5.6, "bytes have 256 values: ln 256 = 5.55"
    assert set(first.by_depth) == {2, 3, 4}


def test_a_depths_loss_leaves_exactly_the_dead_stages_out():
    stage, ran = Stage(SMALL.config, 0, 6, seed=0), []
    for index, layer in zip(stage.held, stage.layers, strict=True):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    rows = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    losses_by_depth(SMALL, stage, [rows])
    sets = [(4,), (3,), (2,), (3, 4), (2, 4), (2, 3), (2, 3, 4)]
    assert ran == [layer for blocks in sets for layer in (0, 1, *blocks, 5)]


def result(full: float, best: float, half: float) -> Trained:
    return Trained(curve=((10.0, 3.0), (20.0, full)), by_depth={6: full, 5: best, 3: half})


@pytest.mark.parametrize(
    ("seed", "holds"),
    [
        ((1.6, 1.58, 1.62), [True, True, True, True]),
        ((1.7, 1.58, 1.62), [False, True, True, True]),
        ((1.7, 1.66, 1.69), [False, False, True, True]),
        ((1.6, 1.58, 1.66), [True, True, False, True]),
    ],
)
def test_one_bad_seed_fails_its_bar_and_no_other(seed, holds):
    found = {
        SKIP.name: [result(1.6, 1.58, 1.62), result(*seed)],
        FULL.name: [result(1.65, 1.65, 2.5)] * 2,
        SAME_STEPS.name: [result(1.5, 1.5, 2.4)] * 2,
    }
    assert [bar.holds for bar in skip_training.bars(found)] == holds
    weak = {**found, SAME_STEPS.name: [result(1.5, 1.5, 2.4), result(1.5, 1.5, 2.0)]}
    assert not skip_training.bars(weak)[-1].holds
    assert len(skip_training.rows(found)) == 9


@pytest.fixture
def _fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_training, "iteration_seconds", lambda full: 75.0 if full else 33.0)


@pytest.mark.usefixtures("_fixed_times")
def test_the_full_pipeline_gets_as_many_steps_as_fit_into_the_skipping_arms_time(monkeypatch):
    calls = []

    def fake(setting: Setting, arm: Arm, steps: int, seed: int, step_s) -> Trained:
        seconds = sum(step_s(arm.is_full(step, setting.stages)) for step in range(steps))
        calls.append((arm.name, steps, seed, seconds))
        return Trained(curve=((seconds, 2.0),), by_depth={6: 1.6, 5: 1.6, 3: 1.6})

    monkeypatch.setattr(skip_training, "train", fake)
    outcome = skip_training.measure(Options(seeds=2))
    skip, same_time, same_steps = (next(call for call in calls if call[0] == arm.name) for arm in ARMS)
    assert skip[3] - 75 < same_time[3] <= skip[3] < same_steps[3]
    assert same_steps[1] == skip[1] == 2700
    assert [call[2] for call in calls] == [0, 1] * 3
    assert len(outcome.bars) == 4
    assert not outcome.passed, "equal losses are not lower ones"
    assert list(outcome.extras) == ["skip-training-curve.svg"]
    assert len(skip_training.measure(Options(quick=True)).bars) == 2


@pytest.mark.usefixtures("_fixed_times")
def test_the_notes_state_the_cost_at_equal_steps():
    found = {
        SKIP.name: [result(1.6, 1.58, 1.62), result(1.63, 1.6, 1.62)],
        FULL.name: [result(1.65, 1.65, 2.5)] * 2,
        SAME_STEPS.name: [result(1.5, 1.5, 2.4)] * 2,
    }
    text = " ".join(skip_training.notes(found, {SKIP: 10, FULL: 4, SAME_STEPS: 10}))
    assert "+0.100 .. +0.130 nats with all stages and +0.080 .. +0.100 at the best depth" in text


def test_the_curve_names_every_arm_and_draws_a_line_for_each_seed():
    found = {arm.name: [result(1.6, 1.58, 1.62)] * 3 for arm in ARMS}
    drawn = ET.fromstring(skip_training.curves(found))
    names = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {*(arm.name for arm in ARMS), "simulated hours"} <= set(names)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 9
