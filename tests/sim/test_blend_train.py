"""Experts trained in virtual time: what a run is a function of, what survives losses, and who may read what."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_blend_kit import WORDS, recipe, run, source, weights

from talkoot.blend.folder import Blend
from talkoot.blend.statistics import Statistics
from talkoot.blend.train.records import Done, Planned
from talkoot.core.errors import TalkootError
from talkoot.core.fold import fold
from talkoot.core.log import Log
from talkoot.model.huggingface import load_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert run(recipe(), folder)[0].finished
    return folder


def test_a_run_leaves_a_blend_of_experts_that_know_their_domains(whole):
    blend = Blend.open(whole)
    assert set(blend.names) == set(WORDS)
    for expert in blend:
        assert expert.trained["steps"] == 12
        statistics = Statistics.read(whole / expert.statistics)
        assert statistics.provenance.domain == expert.name
        assert statistics.documents > 60
        assert load_model(blend.model_folder(expert.name)).whole
    result, entries = run(recipe(), whole)
    assert result.already
    assert not entries
    for domain, losses in result.losses.items():
        assert min(losses, key=lambda name: losses[name]) == domain


def test_experts_that_train_their_mlps_alone_keep_the_trunk_bit_for_bit(whole):
    trunk = load_model(whole / "general").tensors()
    for name in WORDS:
        expert = load_model(whole / "experts" / name).tensors()
        differ = {key for key in trunk if not bool((trunk[key] == expert[key]).all())}
        assert differ
        assert all(".mlp." in key for key in differ)


@pytest.mark.parametrize(
    "fault",
    [
        {"peer": "alder", "step": 4, "phase": "slice"},
        {"peer": "birch", "step": 12, "phase": "begin"},
        {"peer": "birch", "step": 8, "phase": "end"},
        {"peer": "birch", "step": 8, "phase": "slice", "kind": "stop"},
        {"peer": "alder", "at_s": 0.001, "kind": "kill"},
    ],
)
def test_losses_change_no_bit_of_any_expert(whole, tmp_path, fault):
    result, entries = run(recipe(faults=[fault]), tmp_path)
    assert result.finished
    assert any(entry.receipt.op == "peer.lost" for entry in entries)
    assert weights(tmp_path) == weights(whole)


@pytest.mark.parametrize("after", [2, 9, 20])
def test_an_interrupted_run_resumes_with_the_same_bits(whole, tmp_path, after):
    first, _ = run(recipe(), tmp_path, stop_after=after)
    assert not first.finished
    assert not first.already
    second, _ = run(recipe(), tmp_path)
    assert second.finished
    assert weights(tmp_path) == weights(whole)


def test_one_peer_or_five_make_the_same_experts(whole, tmp_path):
    for count in (1, 5):
        folder = tmp_path / str(count)
        assert run(recipe(peers=[{"count": count}]), folder)[0].finished
        assert weights(folder) == weights(whole)


def test_a_domain_is_read_by_its_owner_alone(tmp_path):
    domains = [{"name": name, "source": source(name), "difficulty": "medium"} for name in WORDS]
    domains[1]["peer"] = "birch"
    result, entries = run(recipe(domains=domains, peers=[{"count": 3}]), tmp_path)
    assert result.finished
    names = fold(Log(tmp_path / "log.sqlite").entries())["blend"].names
    about = [
        (entry.receipt.read(Done).job.partition("/")[2], names[entry.receipt.peer])
        for entry in entries
        if entry.receipt.op == "blend.done"
    ]
    assert {who for what, who in about if what == "birds"} == {"birch"}
    signed = Statistics.read(tmp_path / "statistics" / "birds.safetensors").provenance.sources[0].contributor
    assert names[signed] == "birch"


def test_unlike_sizes_and_steps_cost_what_equal_ones_do(tmp_path):
    classes = dict(zip(WORDS, ("easy", "medium", "hard"), strict=True))
    domains = [{"name": name, "source": source(name), "difficulty": one} for name, one in classes.items()]
    model = {"hidden": 64}
    plan = {"allocation": "sizes-and-steps", "steps": 80, "lanes": True, "checkpoint_every": 100}
    result, entries = run(recipe(domains=domains, experts=plan, model=model), tmp_path)
    assert result.planned is not None
    assert abs(result.planned.flops / result.planned.budget - 1) <= 0.01
    spent = sum(
        e.receipt.read(Done).flops
        for e in entries
        if e.receipt.op == "blend.done" and e.receipt.read(Done).job.startswith("expert/")
    )
    assert spent == pytest.approx(result.planned.flops)
    sizes = [expert.parameters for expert in Blend.open(tmp_path)]
    assert sizes == sorted(set(sizes))


def test_classes_that_nobody_gave_are_estimated(tmp_path):
    domains = [{"name": name, "source": source(name)} for name in WORDS]
    result, entries = run(recipe(domains=domains, experts={"allocation": "marginal", "steps": 60}), tmp_path)
    planned = next(entry.receipt.read(Planned) for entry in entries if entry.receipt.op == "blend.plan")
    assert sorted(one.difficulty for one in planned.classes) == ["easy", "hard", "medium"]
    assert len({one.steps for one in planned.plan}) > 1
    assert result.finished


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"domains": []}, "domains"),
        ({"domains": [{"name": "A b", "source": "x"}]}, "'A b'"),
        ({"domains": [{"name": "moe", "source": "x"}]}, "'moe'"),
        ({"experts": {"allocation": "stepz"}}, "allocation"),
        ({"experts": {"steps": 10**30}}, "experts.steps"),
        ({"experts": {"learning_rate": float("nan")}}, "experts.learning_rate"),
        ({"experts": {"warmup": 500}}, "experts.warmup"),
        ({"model": {"sizes": {"huge": {}}}}, "model.sizes"),
        ({"peers": [{"count": 10**12}]}, "peers"),
        ({"faults": [{"peer": "elm", "step": 1, "phase": "begin"}]}, "faults[0].peer"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changes, where):
    with pytest.raises(TalkootError) as caught:
        recipe(**changes)
    assert where in caught.value.where


def test_a_missing_text_is_refused_before_anything_is_trained(tmp_path):
    domains = [{"name": "gone", "source": str(tmp_path / "no.jsonl")}]
    with pytest.raises(TalkootError, match="does not exist"):
        run(recipe(domains=domains), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_text_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    domains = [{"name": "empty", "source": str(tmp_path / "empty.txt")}]
    with pytest.raises(TalkootError, match="nothing to read"):
        run(recipe(domains=domains), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_recipe_is_refused(whole):
    with pytest.raises(TalkootError, match="another run") as caught:
        run(recipe(experts={"steps": 13}), whole)
    assert "experts.steps" in caught.value.why
