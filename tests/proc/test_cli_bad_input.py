"""Whatever a user gets wrong is said in four parts (what, where, why, next): exit code 2, no traceback, no loss."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest
from processes import DEADLINE, commits, execute, read_log, start, stop, talkoot, tiny, to_toml, wait_for, write_text

from talkoot.train.checkpoint import newest
from talkoot.world.blobs import Blobs


@pytest.fixture
def job(tmp_path):
    """A recipe file that works as it is."""
    return to_toml(tiny(write_text(tmp_path), steps=2), tmp_path / "recipe.toml")


def refused(*arguments, code: int = 2, env=None) -> dict[str, str]:
    """The four parts of the message, the same with and without --json."""
    done = talkoot(*arguments, "--json", env=env)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    problem = json.loads(done.stdout)
    assert problem["exit_code"] == code
    parts = problem["error"]
    assert list(parts) == ["what", "where", "why", "next"]
    assert all(parts.values()), parts
    return parts


def untouched(folder) -> bool:
    """Whether no run was begun: no receipt, no snapshot, no key."""
    return not read_log(folder) and not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("setting", "where", "why"),
    [
        ("train.stepz=3", "key train.stepz", "did you mean 'steps'?"),
        ("trian.steps=3", "key trian", "did you mean 'train'?"),
        ("train.steps=many", "train.steps", "Expected `int`, got `str`"),
        ("train.steps=0", "train.steps", "at least 1"),
        ("train=3", "key train", "Expected `object`, got `int`"),
        ("nonsense", "--set nonsense", "section.key=value"),
        ("=3", "--set =3", "section.key=value"),
        ("seed.x=3", "--set seed.x=3", "not a section"),
        ("swarm.speeds=[2.0]", "swarm.speeds", "(0, 1]"),
        ("swarm.speeds=[0.0]", "swarm.speeds", "(0, 1]"),
        ("swarm.speeds=[nan]", "swarm.speeds", "(0, 1]"),
        ("swarm.replicas=5", "swarm.replicas", "5 replicas share 4 microbatches"),
        ("train.planner=strait", "train.planner", "did you mean 'straight'?"),
        ("mixing.rule=nolocco", "mixing.rule", "did you mean 'noloco'?"),
        ('recovery.ladder=["replca"]', "recovery.ladder", "did you mean 'replica'?"),
        ("train.schedule=cosin", "train.schedule", "did you mean 'cosine'?"),
        ("model.dtype=float17", "model.dtype", "float17"),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_is_written(job, tmp_path, setting, where, why):
    for verb in (["train", job, "--out", tmp_path / "run"], ["plan", job]):
        parts = refused(*verb, "--set", setting)
        assert where in parts["where"]
        assert why in parts["why"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fault", "where", "why"),
    [
        ('peer = "brich"\nstep = 1\nphase = "mix"', "faults[0].peer", "did you mean 'birch'?"),
        ('peer = "birch"\nstep = 1\nphase = "mixx"', "faults[0].phase", "did you mean 'mix'?"),
        ('peer = "birch"\nstep = 1\nphase = "mix"\nkind = "kil"', "faults[0].kind", "did you mean 'kill'?"),
        ('peer = "birch"\nstep = 1\nphase = "mix"\nseconds = -2', "faults[0].seconds", "at least 0"),
        ('peer = "birch"\nstep = 1\nphase = "mix"\nat_s = 3', "faults[0].at_s", "either"),
    ],
)
def test_a_wrong_chaos_file_is_refused_before_anything_is_written(job, tmp_path, fault, where, why):
    chaos = tmp_path / "chaos.toml"
    chaos.write_text(f"[[faults]]\n{fault}\n")
    parts = refused("train", job, "--chaos", chaos, "--out", tmp_path / "run")
    assert parts["what"] == "the chaos file cannot be used"
    assert parts["where"] == f"{chaos}, key {where}"
    assert why in parts["why"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"train = [", "not TOML"), (b"\xff\xfe", "not TOML"), (b"just words", "not TOML"), (None, "No such file")],
)
def test_a_recipe_that_is_none(tmp_path, content, why):
    path = tmp_path / "recipe.toml"
    if content is not None:
        path.write_bytes(content)
    parts = refused("train", path, "--out", tmp_path / "run")
    assert parts["where"] == str(path)
    assert why in parts["why"]


@pytest.mark.parametrize(
    ("settings", "what", "why"),
    [
        (["data.source=missing.txt"], "data source does not exist", "missing.txt"),
        (["data.source=EMPTY"], "nothing to read", "empty (0 bytes)"),
        (["data.source=SHORT"], "too little text", "takes 65 tokens"),
        (["data.source=bundled:shakespear"], "data source does not exist", "did you mean 'shakespeare'?"),
        (["data.tokenizer=nowhere"], "cannot be read", "No such file"),
        (["data.tokenizer=bpe:10"], "vocabulary is too small", "256 bytes"),
        (["swarm.stages=9"], "cannot be cut", "9 stages"),
        (["model.load=EMPTYFOLDER"], "tokenizer.json", "other formats"),
        (["model.load=nowhere"], "cannot be read", "No such file"),
    ],
)
def test_what_a_recipe_names_must_exist_and_fit(job, tmp_path, settings, what, why):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("brief")
    (tmp_path / "folder").mkdir()
    places = {"EMPTYFOLDER": "folder", "EMPTY": "empty.txt", "SHORT": "short.txt"}
    flags = []
    for setting in settings:
        key, _, value = setting.partition("=")
        flags += ["--set", f"{key}={tmp_path / places[value] if value in places else value}"]
    parts = refused("train", job, "--out", tmp_path / "run", *flags)
    assert what in parts["what"]
    assert why in parts["why"] + parts["where"]
    assert untouched(tmp_path / "run")


def test_after_a_refusal_the_corrected_command_trains_as_if_nothing_had_been(job, tmp_path):
    (tmp_path / "short.txt").write_text("brief brief brief")
    flags = ["--set", "data.tokenizer=bpe:300", "--json", "--sim"]
    refused("train", job, "--out", tmp_path / "run", "--set", f"data.source={tmp_path}/short.txt", *flags[:2])
    second = json.loads(talkoot("train", job, "--out", tmp_path / "run", *flags).stdout)
    fresh = json.loads(talkoot("train", job, "--out", tmp_path / "fresh", *flags).stdout)
    assert second["state_hash"] == fresh["state_hash"]  # in particular: the short text's tokenizer is not in use


def test_a_run_folder_that_is_a_file_or_below_one(job, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file/run"):
        parts = refused("train", job, "--out", out)
        assert parts["where"] == str(out)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_folder_that_may_not_be_written(job, tmp_path):
    if os.geteuid() == 0:
        parts = refused("train", job, "--out", "/proc/talkoot")  # root may write anywhere that can be written at all
        assert parts["where"] == "/proc/talkoot"
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        parts = refused("train", job, "--out", tmp_path / "locked/run")
        assert parts["why"] == "Permission denied"


@pytest.mark.parametrize("world", ["real", "simulated"])
def test_a_diverged_run_stops_and_keeps_its_snapshot(tmp_path, world):
    recipe = to_toml(
        tiny(write_text(tmp_path), steps=6, learning_rate=1e30, warmup=0, checkpoint_every=1), tmp_path / "r.toml"
    )
    flags = ["--sim"] if world == "simulated" else []
    parts = refused("train", recipe, "--out", tmp_path / "run", *flags)
    assert parts["what"] == "training diverged"
    assert "not applied" in parts["why"]
    assert "lower train.learning_rate" in parts["next"]
    manifest, warnings = newest(tmp_path / "run", Blobs(tmp_path / "run/blobs"))
    assert warnings == []
    assert manifest.step == commits(tmp_path / "run") >= 1
    assert f"snapshot of step {manifest.step} is intact" in parts["next"]


def test_an_address_that_is_not_of_this_machine(job, tmp_path):
    parts = refused("train", job, "--out", tmp_path / "run", "--set", "swarm.host=203.0.113.7")
    assert "203.0.113.7" in parts["where"]
    assert untouched(tmp_path / "run")


@pytest.mark.parametrize("verb", ["status", "replay", "report", "export"])
def test_a_folder_that_is_no_run(verb, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "notes.txt"):
        parts = refused(verb, folder, *([tmp_path / "out"] if verb == "export" else []))
        assert str(folder) in parts["where"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_a_log_that_is_something_else(tmp_path):
    (tmp_path / "log.sqlite").write_text("this is no database at all, whatever its name says. " * 50)
    for verb in ("status", "replay", "report"):
        assert refused(verb, tmp_path)["what"] == "this is not a talkoot run log"


def test_a_report_that_cannot_be_written(tmp_path):
    execute(tiny(write_text(tmp_path), steps=1), tmp_path / "run", sim=True)
    parts = refused("report", tmp_path / "run", "--out", tmp_path)
    assert parts["where"] == str(tmp_path)


def watch_refused(*arguments) -> str:
    done = talkoot("watch", *arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_watch_says_who_holds_its_port(tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        said = watch_refused(tmp_path, "--port", port)
    assert f"port {port} is already in use" in said
    assert f"process {os.getpid()} " in said
    assert "--port 0" in said


def test_watch_refuses_what_cannot_be_served(tmp_path):
    assert "there is no such run" in watch_refused(tmp_path / "missing")
    assert "cannot be served there" in watch_refused(
        tmp_path, "--host", "203.0.113.7", "--token", "secret", "--port", 0
    )
    assert "needs a token" in watch_refused(tmp_path, "--host", "0.0.0.0", "--port", 0)
    assert "--port" in watch_refused(tmp_path, "--port", 99_999)


def test_watch_serves_until_ctrl_c(tmp_path):
    import urllib.request

    execute(tiny(write_text(tmp_path), steps=1), tmp_path / "run", sim=True)
    said = tmp_path / "said.txt"
    server = start("watch", tmp_path / "run", "--port", 0, folder=tmp_path)
    try:
        wait_for(lambda: "http://" in said.read_text(), server)
        address = said.read_text().split()[-1]
        with urllib.request.urlopen(address, timeout=DEADLINE) as page:
            assert b"<html" in page.read()
        server.send_signal(signal.SIGINT)
        assert server.wait(DEADLINE) in (0, 130)
    finally:
        stop(server)
    assert "Traceback" not in said.read_text()


@pytest.mark.parametrize(
    "arguments", [("demo", "--steps", 0), ("demo", "--steps", "x"), ("bench", "sim-speed", "--seeds", 0)]
)
def test_numbers_out_of_range_on_the_command_line(arguments):
    refused(*arguments)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "..", " ", "a/b"])
def test_a_recipes_name_cannot_leave_the_folder_of_runs(job, tmp_path, name):
    done = talkoot("train", job, "--sim", "--json", "--set", f"name={json.dumps(name)}", cwd=tmp_path)
    assert done.returncode == 2
    assert repr(name) in json.loads(done.stdout)["error"]["why"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml", "text.txt"]
