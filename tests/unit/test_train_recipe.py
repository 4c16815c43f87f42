"""A recipe says everything a run is, and refuses what it cannot be, naming key, value and remedy."""

from __future__ import annotations

import msgspec
import pytest

from talkoot.core.errors import Exit, TalkootError
from talkoot.recipes.demo import demo
from talkoot.train.prepare import cut_stages, model_config
from talkoot.train.recipe import Recipe, build_recipe, load_recipe, peer_names


def refused(tree: dict) -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        build_recipe(tree, "recipe.toml")
    assert caught.value.code == Exit.BAD_INPUT
    assert caught.value.next
    return caught.value


@pytest.mark.parametrize(
    ("tree", "where", "hint"),
    [
        ({"sede": 1}, "key sede", "'seed'"),
        ({"trian": {}}, "key trian", "'train'"),
        ({"data": {"sorce": "x"}}, "key data.sorce", "'source'"),
        ({"model": {"dept": 3}}, "key model.dept", "'depth'"),
        ({"train": {"step": 3}}, "key train.step", "'steps'"),
        ({"swarm": {"replica": 3}}, "key swarm.replica", "'replicas'"),
        ({"network": {"defalt": {}}}, "key network.defalt", "'default'"),
        ({"network": {"default": {"latency": 1.0}}}, "key network.default.latency", "'latency_s'"),
        ({"network": {"links": {"alder->birch": {"los": 0.1}}}}, "key network.links.alder->birch.los", "'loss'"),
        ({"faults": [{"peer": "alder", "step": 1, "phase": "mix", "kin": "kill"}]}, "key faults[0].kin", "'kind'"),
    ],
)
def test_an_unknown_key_of_any_section_is_refused_with_the_nearest_name(tree, where, hint):
    problem = refused(tree)
    assert where in problem.where
    assert hint in problem.why


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"train": {"steps": "many"}}, "key train.steps"),
        ({"train": {"steps": 1.5}}, "key train.steps"),
        ({"recovery": {"ladder": "replica"}}, "key recovery.ladder"),
        ({"model": {"dtype": "float16"}}, "key model.dtype"),
        ({"swarm": {"respawn": 1}}, "key swarm.respawn"),
        ({"train": 5}, "key train"),
        ({"faults": [{"peer": 5}]}, "key faults[0]"),
        ({"faults": [{"peer": "alder", "step": 1, "phase": "mix", "kind": "kil"}]}, "key faults[0].kind"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_key(tree, where):
    assert where in refused(tree).where


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "steps", 0),
        ("train", "microbatches", 0),
        ("train", "microbatch_size", -1),
        ("train", "keep_checkpoints", 0),
        ("train", "learning_rate", 0.0),
        ("train", "learning_rate", float("nan")),
        ("train", "learning_rate", float("inf")),
        ("train", "clip", -1.0),
        ("train", "clip", float("nan")),
        ("train", "weight_decay", -0.1),
        ("train", "warmup", -1),
        ("train", "decay", 1.5),
        ("train", "final_rate", -0.5),
        ("train", "beta1", 1.0),
        ("train", "beta2", -0.1),
        ("train", "epsilon", 0.0),
        ("train", "patience_s", 0.0),
        ("train", "checkpoint_every", -1),
        ("train", "evaluate_every", -1),
        ("train", "evaluate_batches", -1),
        ("swarm", "stages", 0),
        ("swarm", "replicas", 0),
        ("swarm", "threads", 0),
        ("swarm", "replicas", 9),
        ("swarm", "speeds", [1.0, 0.0]),
        ("swarm", "speeds", [2.0]),
        ("model", "context", 0),
    ],
)
def test_a_number_outside_its_limits_is_refused_with_its_key_and_value(section, key, value):
    problem = refused({section: {key: value}})
    assert problem.where == f"{section}.{key}"
    assert str(value) in problem.why


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_that_no_receipt_could_carry_is_refused(seed):
    assert refused({"seed": seed}).where.endswith("key seed")


@pytest.mark.parametrize(
    ("fault", "where", "hint"),
    [
        ({"peer": "aldr", "phase": "mix"}, "peer", "'alder'"),
        ({"peer": "elm", "phase": "mix"}, "peer", "there is no peer 'elm'"),
        ({"phase": "mix"}, "peer", "there is no peer ''"),
        ({"peer": "alder", "phase": "forwards"}, "phase", "'forward'"),
        ({"peer": "alder", "phase": "mix", "step": None}, "step", "at least 0"),
        ({"peer": "alder", "phase": "mix", "step": -1}, "step", "at least 0"),
        ({"peer": "alder", "phase": "mix", "seconds": -1.0}, "seconds", "at least 0"),
        ({"peer": "alder", "phase": "mix", "seconds": float("inf")}, "seconds", "at least 0"),
        ({"peer": "alder", "phase": "mix", "at_s": 3.0}, "at_s", "either"),
        ({"peer": "alder", "step": None}, "at_s", "either"),
        ({"peer": "alder", "step": None, "at_s": -3.0}, "at_s", "at least 0"),
        ({"peer": "lead", "phase": "begin"}, "peer", "the lead can have a full disk, and no kill"),
        ({"peer": "lead", "phase": "beginning", "kind": "disk_full"}, "phase", "'begin'"),
        ({"peers": ["alder", "birch"], "phase": "mix"}, "peers", "for a partition"),
        ({"peer": "alder", "peers": ["birch"], "phase": "mix", "kind": "partition"}, "peers", "instead of peer"),
        ({"peers": ["alder", "brich"], "phase": "mix", "kind": "partition"}, "peers", "'birch'"),
    ],
)
def test_a_fault_that_could_never_strike_is_refused(fault, where, hint):
    good = {"peer": "alder", "at_s": 2.0, "kind": "stop", "seconds": 1.0}
    problem = refused({"faults": [good, {"step": 1} | fault]})
    assert problem.where == f"faults[1].{where}"
    assert hint in problem.why


def test_a_file_and_overrides_make_a_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('seed = 4\n[train]\nsteps = 10\nschedule = "constant-decay"\n')
    recipe = load_recipe(
        path, ("train.steps=500", "data.source=some/text", "swarm.speeds=[1.0, 0.5]", "model.load=x=y")
    )
    assert (recipe.seed, recipe.train.steps, recipe.train.schedule) == (4, 500, "constant-decay")
    assert (recipe.data.source, recipe.model.load) == ("some/text", "x=y")
    assert [recipe.swarm.speed(index) for index in range(3)] == [1.0, 0.5, 1.0]
    assert load_recipe(None) == Recipe()


@pytest.mark.parametrize("text", ["train", "=3", "train.steps.x=1", "train=1"])
def test_an_override_that_makes_no_sense_is_refused(text):
    with pytest.raises(TalkootError):
        load_recipe(None, ("train.steps=5", text))


def test_an_overrides_unknown_key_is_refused_like_a_files():
    with pytest.raises(TalkootError) as caught:
        load_recipe(None, ("train.stpes=5",))
    assert "'steps'" in caught.value.why


@pytest.mark.parametrize("content", [b"[train\nsteps = 1", b"steps = = 2", b"\xff\xfe\x00"])
def test_broken_toml_is_refused_with_the_file_and_the_line(content, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(TalkootError) as caught:
        load_recipe(path)
    assert str(path) in caught.value.where


def test_a_missing_file_is_refused_with_its_name(tmp_path):
    with pytest.raises(TalkootError) as caught:
        load_recipe(tmp_path / "nothing.toml")
    assert "nothing.toml" in caught.value.where


def test_a_recipe_survives_the_log():
    recipe = demo()
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(recipe))), Recipe) == recipe


def test_names_do_not_repeat_and_do_not_depend_on_the_swarms_size():
    names = peer_names(200)
    assert len(set(names)) == 200
    assert names[:4] == ["alder", "birch", "cedar", "dogwood"]
    assert peer_names(30) == names[:30]
    assert names[12] == "alder2"


def test_the_cut_covers_the_model_and_too_many_stages_are_refused():
    recipe = build_recipe({"model": {"depth": 3}, "swarm": {"stages": 3}}, "")
    config = model_config(recipe)
    ranges = cut_stages(config, recipe)
    assert (ranges[0][0], ranges[-1][1], len(ranges)) == (0, config.layer_count, 3)
    with pytest.raises(TalkootError, match="that many stages"):
        cut_stages(config, build_recipe({"model": {"depth": 3}, "swarm": {"stages": 6}}, ""))


@pytest.mark.parametrize(
    ("swarm", "stages"),
    [
        ({"stages": 3, "cut": [1, 2, 1]}, [(0, 2), (2, 4), (4, 6)]),
        ({"stages": 1, "cut": [4]}, [(0, 6)]),
        ({"stages": 3, "layout": "ring", "cut": [0, 3, 1]}, [(-1, 1), (1, 4), (4, 5)]),
    ],
)
def test_stages_can_be_cut_by_hand(swarm, stages):
    recipe = build_recipe({"swarm": swarm, "model": {"depth": 4}}, "here")
    assert cut_stages(model_config(recipe), recipe) == stages


def test_a_cut_that_is_not_the_models_is_refused():
    recipe = build_recipe({"swarm": {"stages": 2, "cut": [1, 2]}, "model": {"depth": 4}}, "here")
    with pytest.raises(TalkootError, match=r"swarm\.cut"):
        cut_stages(model_config(recipe), recipe)
    for bad in ({"stages": 2, "cut": [1]}, {"stages": 2, "cut": [0, 4]}):
        with pytest.raises(TalkootError, match=r"swarm\.cut"):
            build_recipe({"swarm": bad}, "here")


@pytest.mark.parametrize("value", [99999999999999999999999, 2**40])
@pytest.mark.parametrize("path", ["train.steps", "swarm.stages", "swarm.threads", "mixing.fragments", "train.warmup"])
def test_an_integer_that_nobody_could_mean_is_refused_by_its_key(path: str, value: int):
    with pytest.raises(TalkootError) as refused:
        load_recipe(None, (f"{path}={value}",))
    assert refused.value.where.endswith(path)
