"""``talkoot plan --network``: its answers, its files, and what it says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from processes import DEADLINE, talkoot

from talkoot import cli
from talkoot.plan.networks import named_network
from talkoot.plan.problem import Lane, Routes, Rules, violations
from talkoot.plan.profile import dump_profile, to_problem
from talkoot.train.recipe import load_recipe

QUICK = ["--budget-s", 1]
SMALL = ["--network", "random:4:unlike", "--nodes", "8", "--stages", "4", "--visits", "3", "--slots", "2", *QUICK]


@pytest.fixture
def say(monkeypatch, capsys, tmp_path):
    """Runs the command line in this process, in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["talkoot", "plan", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture
def answer(say):
    def run(*arguments: object) -> dict[str, Any]:
        code, out, err = say(*arguments, "--json")
        assert code == 0, out + err
        return json.loads(out)

    return run


@pytest.fixture
def refusal(say, tmp_path):
    """The four parts of a refusal, after which nothing was written."""

    def run(*arguments: object) -> dict[str, str]:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code, out, err = say(*arguments, "--json")
        assert code == 2, out + err
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        parts = json.loads(out)["error"]
        assert all(parts.values()), parts
        return parts

    return run


def routes_of(view: dict[str, Any], names: tuple[str, ...]) -> Routes:
    lanes = [[names.index(name) for name in lane["path"]] for lane in view["lanes"]]
    counts = [lane["microbatches"] for lane in view["lanes"]]
    return Routes(
        groups=tuple(tuple(names.index(name) for name in group) for group in view["placement"]),
        lanes=tuple(Lane(path[0], tuple(path[1:]), count) for path, count in zip(lanes, counts, strict=True)),
    )


def test_the_answer_says_who_holds_what_which_ways_lead_where_and_how_good_that_is(answer):
    found = answer(*SMALL, "--seed", 3)
    profile = named_network("random:4:unlike", 8)
    problem = to_problem(profile, activation_bytes=1, gradient_bytes=1, stage_layers=(1,) * 4, samples=8)
    problem = msgspec.structs.replace(problem, slots=(2,) * 8)
    for quotas in ("equal", "free"):
        view = found[quotas]
        assert view["violations"] == []
        assert violations(problem, routes_of(view, problem.names), Rules(visits=3)) == []
        assert view["seconds"] >= view["lower_bound_s"] * (1 - 1e-9)
        assert view["gap_to_bound"] == pytest.approx(view["seconds"] / view["lower_bound_s"] - 1)
        assert view["bound_by"]
        assert sum(lane["microbatches"] for lane in view["lanes"]) == found["microbatches"]
        assert {row["node"] for row in view["holders"]} == set(problem.names)
    assert {key: found[key] for key in found["equal"]} == found["equal"], "the top level is the plan of equal quotas"
    assert len(set(found["equal"]["microbatches_per_origin"].values())) == 1


def test_the_same_seed_gives_the_same_plan_whatever_process_makes_it(answer):
    flags = [
        "--network",
        "random:4:unlike",
        "--nodes",
        5,
        "--stages",
        3,
        "--visits",
        2,
        "--seed",
        7,
        "--quotas",
        "equal",
    ]
    here = answer(*flags)
    there = json.loads(talkoot("plan", *flags, "--json").stdout)
    assert there | {"planning_s": 0} == here | {"planning_s": 0}
    assert "free" not in here


def test_text_shows_both_quotas_side_by_side_and_recommends(say):
    code, out, _ = say(*SMALL, "--seed", 3)
    assert code == 0
    for words in (
        "equal quotas",
        "free quotas",
        "proven lower bound",
        "gap to the bound",
        "what binds",
        "recommended:",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) < 160


def test_a_placement_is_kept_whether_it_comes_from_the_line_or_a_file_or_an_earlier_answer(answer, tmp_path):
    names = named_network("random:4:unlike", 8).nodes
    groups = [[names[i].name for i in group] for group in ((5, 0, 3), (1, 2), (4,), (7, 6))]
    line = "/".join(",".join(group) for group in groups)
    first = answer(*SMALL, "--quotas", "equal", "--placement", line)
    assert first["placement"] == groups
    (tmp_path / "first.json").write_text(json.dumps(first))
    (tmp_path / "first.toml").write_text(f"placement = {json.dumps(groups)}")
    for name in ("first.json", "first.toml"):
        assert answer(*SMALL, "--quotas", "equal", "--placement", name)["placement"] == groups


def test_what_each_single_failure_costs(answer, say):
    found = answer(*SMALL, "--quotas", "free", "--failures")
    assert len(found["failures"]) == 8
    assert {row["node"] for row in found["failures"]} == {row["node"] for row in found["holders"]}
    _, out, _ = say(*SMALL, "--quotas", "free", "--failures")
    assert "what the loss of one node costs" in out


RING = ["--set", "swarm.layout=ring", "--set", "swarm.stages=4", "--set", "swarm.replicas=1"]


def test_a_plain_recipe_is_told_what_each_loss_of_a_stage_and_of_two_adjacent_ones_costs(answer, say):
    found = answer(*RING, "--failures")["recovery"]
    assert [row["lost"] for row in found["losses"][:5]] == [*(f"stage {s}" for s in range(4)), "stages 0 and 1"]
    assert len(found["losses"]) == 8
    assert {(row["rung"], row["exact"], row["none_because"]) for row in found["losses"]} == {("checkpoint", True, None)}
    assert all(row["seconds"] > 50 * found["iteration_s"] for row in found["losses"])  # half of train.checkpoint_every
    _, out, _ = say(*RING, "--failures", "--set", 'recovery.ladder=["replica"]')
    assert "the run ends: stage 1: replica: nobody else holds it" in out
    _, out, _ = say(*RING)
    assert "what the loss of a stage costs" not in out


def test_a_recipe_planned_on_a_network_is_told_the_same_with_its_links(answer):
    where = ["--network", "gcp12", "--nodes", "4", "--quotas", "equal", *QUICK]
    near, far = answer(*RING, "--failures")["recovery"], answer(*RING, *where, "--failures")["recovery"]
    assert far["iteration_s"] > 10 * near["iteration_s"]
    assert all(b["seconds"] > a["seconds"] for a, b in zip(near["losses"], far["losses"], strict=True))


def test_timelines_are_a_page_or_a_trace(say, tmp_path):
    assert say(*SMALL, "--quotas", "equal", "--timeline", "t.html")[0] == 0
    assert (tmp_path / "t.html").read_text().startswith("<!doctype html>")
    code, _, err = say(*SMALL, "--quotas", "equal", "--timeline", "t.json")
    assert code == 0
    assert "wrote t.json" in err
    assert {event["ph"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} >= {
        "X",
        "M",
        "s",
        "f",
    }


RECIPE = """
name = "job"
[data]
source = "text.txt"
tokenizer = "bytes"
[model]
depth = 3
context = 32
[train]
steps = 2
microbatches = 9
microbatch_size = 2
warmup = 0
evaluate_every = 0
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "text.txt").write_text("all that glisters is not gold; " * 600)
    (tmp_path / "job.toml").write_text(RECIPE)
    return "job.toml"


def test_a_planned_recipe_trains_as_it_is_written(answer, recipe, tmp_path):
    found = answer(recipe, *SMALL, "--out", "planned.toml")
    assert found["microbatches"] == 9
    assert found["step_seconds"] > found["seconds"] * 0.9
    planned = load_recipe(tmp_path / "planned.toml")
    assert [list(route.peers) for route in planned.routes] == [lane["path"] for lane in found["lanes"]]
    assert planned.data == load_recipe(tmp_path / recipe).data
    done = subprocess.run(
        [sys.executable, "-m", "talkoot", "train", "planned.toml", "--sim", "--json", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["step"] == 2


def test_a_planned_recipe_is_told_like_any_other(answer, recipe):
    answer(recipe, *SMALL, "--out", "planned.toml")
    told = answer("planned.toml")
    assert [len(stage["peers"]) for stage in told["stages"]] == [3, 2, 2, 1]
    assert sum(stage["share_of_compute"] for stage in told["stages"]) == pytest.approx(1)


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "where", "why"),
    [
        (["--network", "gcp2", "--stages", 3], "name of a network", "did you mean 'gcp12'?"),
        (["--network", "gcp12", "--stages", 13], "stages", "13 stages and 12 nodes"),
        (["--network", "gcp12", "--stages", 6, "--visits", 7], "visits", "skip ratio is unreachable"),
        (["--network", "gcp12", "--nodes", 12, "--stages", 12, "--visits", 2], "rules", "2 of 12 stages"),
        (["--network", "gcp12", "--stages", 3, "--slots", 0], "Belgium", "without memory"),
        (["--network", "gcp12", "--stages", 3, "--quotas", "fre"], "--quotas", "did you mean 'free'?"),
        (["--network", "gcp12", "--nodes", 0, "--stages", 1], "nodes", "at least 1"),
        (["--network", "gcp12"], "--stages", "how many stages"),
        (["--stages", 3], "--stages", "none is named"),
        (["--contention"], "--contention", "none is named"),
        (["--network", "gcp12", "--stages", 3, "--out", "x.toml"], "--out", "which model"),
        (["--network", "gcp12", "--stages", 3, "--timeline", "x.png"], "--timeline", "neither .html nor .json"),
        (["--network", "gcp12", "--stages", 3, "--timeline", "no/x.html"], "no/x.html", "no file can be written"),
        (["--network", "gcp12", "--stages", 2, "--placement", "Belgium/Iowaa"], "stage 1", "did you mean 'Iowa'?"),
        (["--network", "gcp12", "--stages", 2, "--placement", "Belgium,Iowa"], "placement", "1 stages"),
        (["--network", "gcp12", "--stages", 2, "--placement", "none.toml"], "none.toml", "No such file"),
        (["--network", "none.toml", "--stages", 2], "none.toml", "No such file"),
        (["--network", "gcp12", "--stages", "two"], "talkoot plan", "valid integer"),
        (["--set", "model.depth=2", "--network", "gcp12", "--stages", 5], "swarm.stages", "5 stages"),
    ],
)
def test_what_cannot_be_planned_is_refused(refusal, flags, where, why):
    parts = refusal(*flags)
    assert where in parts["where"] + parts["what"]
    assert why in parts["why"] + parts["what"]


def test_a_disconnected_network_is_refused(refusal, tmp_path):
    lines = dump_profile(named_network("gcp12", 5)).splitlines()
    kept = [line for line in lines if not line.startswith('"Belgium->Canada"')]
    assert len(kept) == len(lines) - 1
    (tmp_path / "net.toml").write_text("\n".join(kept))
    parts = refusal("--network", "net.toml", "--stages", 2)
    assert "nothing links Belgium and Canada" in parts["why"]


def test_a_node_without_memory_is_refused(refusal, tmp_path):
    text = dump_profile(named_network("gcp12", 5))
    (tmp_path / "net.toml").write_text(text.replace("slots = 3", "slots = 0", 1))
    parts = refusal("--network", "net.toml", "--stages", 2)
    assert "without memory" in parts["why"]
    assert "Belgium" in parts["where"]


def test_an_unlikely_link_is_refused_until_it_is_accepted(refusal, answer, tmp_path):
    profile = named_network("gcp12")
    (key,) = [key for key in profile.links if {"NL", "London"} == set(key.split("->"))]
    link = msgspec.structs.replace(profile.links[key], bytes_per_s=profile.links[key].bytes_per_s / 1024)
    (tmp_path / "net.toml").write_text(
        dump_profile(msgspec.structs.replace(profile, links={**profile.links, key: link}))
    )
    flags = ["--network", "net.toml", "--nodes", 12, "--stages", 3, "--quotas", "equal", *QUICK]
    parts = refusal(*flags)
    assert key in parts["why"]
    assert "MiB/s for GiB/s" in parts["why"]
    assert "--accept-outliers" in parts["next"]
    assert answer(*flags, "--accept-outliers")["violations"] == []
