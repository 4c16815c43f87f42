"""A run that ended in any way goes on from its folder, with the bits that it would have had."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from test_train_kit import Fault, model_folder, replace, simulate, text_folder, tiny

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import Entry, State, fold
from talkoot.core.log import Log
from talkoot.model.config import ModelConfig
from talkoot.model.huggingface import load_model, save_folder
from talkoot.model.tokenizer import Tokenizer
from talkoot.run.folder import LOG
from talkoot.run.records import Warned
from talkoot.train.checkpoint import manifests, read_manifest
from talkoot.train.export import export_run
from talkoot.train.lead import Lead
from talkoot.train.recipe import Recipe
from talkoot.train.records import Committed, RolledBack, Seated
from talkoot.train.rehearse import rehearse
from talkoot.train.roster import MAX_RESPAWNS
from talkoot.train.run import run_simulated
from talkoot.train.verify import verify
from talkoot.world.sim.simulation import Simulation

STEPS = 20


class LeadEnds(RuntimeError):
    """The lead's process is gone, as far as the run can tell."""


def recipe_of(**train: object) -> Recipe:
    return tiny(**({"steps": STEPS, "checkpoint_every": 4, "microbatches": 3} | train))


def end_at(op: str, step: int) -> Callable[[Entry, State], None]:
    """An observer that ends the lead right after a receipt entered the log."""

    def observe(entry: Entry, state: State) -> None:
        if (entry.receipt.op, entry.receipt.step) == (op, step):
            raise LeadEnds

    return observe


def entries(folder: Path) -> list[Entry]:
    log = Log(folder / LOG, readonly=True)
    try:
        return list(log.entries())
    finally:
        log.close()


def standing_losses(folder: Path) -> list[tuple[float, ...]]:
    found = {}
    for entry in entries(folder):
        if entry.receipt.op == "train.commit":
            found[entry.receipt.step] = entry.receipt.read(Committed).losses
    return [found[step] for step in sorted(found)]


@cache
def undisturbed(tmp: Path) -> tuple[str, list[tuple[float, ...]]]:
    folder = tmp / "undisturbed"
    return run_simulated(recipe_of(), folder).state_hash, standing_losses(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    ("op", "step", "back_to"),
    [("train.commit", 9, 8), ("train.commit", 2, 0), ("train.step", 9, 8), ("train.checkpoint", 8, None)],
)
def test_a_run_whose_lead_ended_abruptly_goes_on_with_the_same_bits(op, step, back_to, reference, tmp_path):
    with pytest.raises(LeadEnds):
        run_simulated(recipe_of(), tmp_path, end_at(op, step))
    result = run_simulated(recipe_of(), tmp_path)
    assert (result.finished, result.step) == (True, STEPS)
    assert result.state_hash == reference[0]
    assert standing_losses(tmp_path) == reference[1]
    rollbacks = [e.receipt.step for e in entries(tmp_path) if e.receipt.op == "train.rollback"]
    assert rollbacks == ([] if back_to is None else [back_to])
    findings = verify(tmp_path / LOG)
    assert findings.faults == ()
    assert findings.steps == STEPS
    assert findings.final["run"].sessions == 2


def test_a_finished_run_started_again_changes_nothing_but_the_log(reference, tmp_path):
    first = run_simulated(recipe_of(), tmp_path)
    again = run_simulated(recipe_of(), tmp_path)
    assert again.state_hash == first.state_hash == reference[0]
    assert verify(tmp_path / LOG).faults == ()


def test_sessions_that_end_before_they_did_anything_are_told_apart(reference, tmp_path):
    """In virtual time every session starts at zero: without a generation of its own it would repeat old receipts."""
    with pytest.raises(LeadEnds):
        run_simulated(recipe_of(), tmp_path, end_at("train.commit", 8))
    for _ in range(2):
        stopped = run_simulated(recipe_of(), tmp_path, started=lambda lead: setattr(lead, "stop_requested", True))
        assert (stopped.finished, stopped.step) == (False, 8)
    result = run_simulated(recipe_of(), tmp_path)
    assert result.state_hash == reference[0]
    assert fold(entries(tmp_path))["run"].sessions == 4
    assert verify(tmp_path / LOG).faults == ()


def test_more_steps_of_a_finished_run_equal_one_longer_run(tmp_path):
    constant = {"schedule": "constant-decay", "decay": 0.0}
    run_simulated(recipe_of(steps=6, **constant), tmp_path / "two")
    two = run_simulated(recipe_of(steps=9, **constant), tmp_path / "two")
    one = run_simulated(recipe_of(steps=9, **constant), tmp_path / "one")
    assert two.state_hash == one.state_hash


@pytest.mark.parametrize("cut", [(1, 1), (4, 1), (2, 3)])
def test_a_run_goes_on_with_another_cut_and_other_replicas(cut, reference, tmp_path):
    with pytest.raises(LeadEnds):
        run_simulated(recipe_of(), tmp_path, end_at("train.commit", 9))
    recipe = replace(recipe_of(), "swarm", stages=cut[0], replicas=cut[1])
    assert run_simulated(recipe, tmp_path).state_hash == reference[0]
    assert verify(tmp_path / LOG).faults == ()


def damage_blob(folder: Path) -> None:
    blob = folder / "blobs" / read_manifest(manifests(folder)[0]).shards[1].blob
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)


def cut_blob_short(folder: Path) -> None:
    blob = folder / "blobs" / read_manifest(manifests(folder)[0]).shards[0].blob
    blob.write_bytes(blob.read_bytes()[:-8])


def lose_blob(folder: Path) -> None:
    (folder / "blobs" / read_manifest(manifests(folder)[0]).shards[0].blob).unlink()


def cut_manifest_short(folder: Path) -> None:
    newest = manifests(folder)[0]
    newest.write_bytes(newest.read_bytes()[:100])


def of_another_model(folder: Path) -> None:
    newest = manifests(folder)[0]
    text = newest.read_text()
    assert text.count('"rope_theta": ') == 1
    newest.write_text(text.replace('"rope_theta": ', '"rope_theta": 1'))


@pytest.mark.parametrize("damage", [damage_blob, cut_blob_short, lose_blob, cut_manifest_short, of_another_model])
def test_a_damaged_newest_snapshot_is_passed_over_with_a_warning(damage, reference, tmp_path):
    with pytest.raises(LeadEnds):
        run_simulated(recipe_of(), tmp_path, end_at("train.commit", 9))
    damage(tmp_path)
    result = run_simulated(recipe_of(), tmp_path)
    assert result.state_hash == reference[0]
    log = entries(tmp_path)
    warnings = [entry.receipt.read(Warned).text for entry in log if entry.receipt.op == "run.warning"]
    assert len(warnings) == 1
    assert "step-00000008.json" in warnings[0]
    assert [entry.receipt.step for entry in log if entry.receipt.op == "train.rollback"] == [4]


def test_another_runs_checkpoint_is_neither_used_nor_overwritten_nor_removed(reference, tmp_path):
    with pytest.raises(LeadEnds):
        run_simulated(recipe_of(), tmp_path, end_at("train.commit", 9))
    own = manifests(tmp_path)[0]
    foreign = {own.with_name(f"step-{step:08d}.json") for step in (9, 12, 30)}
    for path in foreign:
        path.write_bytes(own.read_bytes().replace(b'"run": "', b'"run": "other-'))
    before = {path: path.read_bytes() for path in foreign}
    result = run_simulated(recipe_of(), tmp_path)
    assert result.state_hash == reference[0]
    warnings = [e.receipt.read(Warned).text for e in entries(tmp_path) if e.receipt.op == "run.warning"]
    assert [text.split()[0] for text in warnings[:3]] == [f"step-{step:08d}.json" for step in (30, 12, 9)]
    assert all("belongs to run other-" in text for text in warnings[:3])
    (given_up,) = warnings[3:]
    assert given_up.startswith("no snapshot of step 12: another run's checkpoint is in the way")
    assert {path: path.read_bytes() for path in foreign} == before
    assert {read_manifest(path).step for path in set(manifests(tmp_path)) - foreign} == {16, 20}


def test_a_damaged_snapshot_of_the_future_does_not_push_out_the_good_ones(reference, tmp_path):
    """Passed over at step 8, it must not count as the newest one when the snapshots from step 3 on are kept."""
    recipe = recipe_of(keep_checkpoints=1, checkpoint_every=8)
    with pytest.raises(LeadEnds):
        run_simulated(recipe, tmp_path, end_at("train.commit", 9))
    damage_blob(tmp_path)
    often = recipe_of(keep_checkpoints=1, checkpoint_every=3)
    with pytest.raises(LeadEnds):
        run_simulated(often, tmp_path, end_at("train.commit", 6))
    assert [read_manifest(path).step for path in manifests(tmp_path)] == [6]
    assert run_simulated(often, tmp_path).state_hash == reference[0]
    seats = [entry.receipt.read(Seated).source for entry in entries(tmp_path) if entry.receipt.op == "peer.seat"]
    assert seats[-4:] == ["snapshot of step 6"] * 4


def test_after_a_fallback_a_later_loss_goes_back_to_a_snapshot_that_exists(tmp_path):
    with pytest.raises(LeadEnds):
        run_simulated(recipe_of(), tmp_path, end_at("train.commit", 9))
    damage_blob(tmp_path)
    resumed = entries(tmp_path)[-1].position
    with pytest.raises(LeadEnds):
        run_simulated(recipe_of(), tmp_path, end_at("train.commit", 5))
    rollback = next(e for e in entries(tmp_path)[resumed:] if e.receipt.op == "train.rollback")
    assert "resumed" in rollback.receipt.read(RolledBack).reason
    state = fold(entries(tmp_path))["train"]
    assert (state.step, state.checkpoint) == (6, 4)


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("train", {"learning_rate": 1e-4}, "train.learning_rate"),
        ("train", {"microbatches": 4}, "train.microbatches"),
        ("model", {"context": 16}, "model.context"),
        ("data", {"held_out": 0.1}, "data.held_out"),
    ],
)
def test_another_recipe_in_the_same_folder_is_refused_with_the_keys_that_differ(section, change, key, tmp_path):
    run_simulated(recipe_of(steps=1), tmp_path)
    with pytest.raises(TalkootError) as caught:
        run_simulated(replace(recipe_of(steps=1), section, **change), tmp_path)
    assert key in caught.value.why
    with pytest.raises(TalkootError, match="another run") as caught:
        run_simulated(msgspec.structs.replace(recipe_of(steps=1), seed=99), tmp_path)
    assert "seed" in caught.value.why


def test_another_tokenizer_in_the_folder_is_refused(tmp_path):
    run_simulated(recipe_of(steps=2), tmp_path)
    Tokenizer.train(["a few words, a few words"] * 9, 258).save(tmp_path / "tokenizer")
    with pytest.raises(TalkootError, match="not the one"):
        run_simulated(recipe_of(steps=3), tmp_path)


def test_a_text_that_changed_is_refused_until_it_is_restored(tmp_path):
    text = tmp_path / "text.txt"
    words = (text_folder() / "text.txt").read_text()
    text.write_text(words)
    recipe = replace(recipe_of(steps=2), "data", source=str(text))
    run_simulated(recipe, tmp_path / "run")
    text.write_text(words.replace("sheep", "hares"))
    with pytest.raises(TalkootError, match="text has changed"):
        run_simulated(replace(recipe, "train", steps=3), tmp_path / "run")
    text.write_text(words)
    assert run_simulated(replace(recipe, "train", steps=3), tmp_path / "run").step == 3


def test_a_folder_in_use_is_refused(tmp_path):
    def start_a_second(entry: Entry, state: State) -> None:
        if entry.receipt.op == "train.commit":
            run_simulated(recipe_of(steps=2), tmp_path)

    with pytest.raises(TalkootError, match="already going on"):
        run_simulated(recipe_of(steps=2), tmp_path, start_a_second)


def test_a_run_that_diverges_stops_before_the_step_and_keeps_its_snapshot(tmp_path):
    """A good run is continued for more steps, and its weights overflow before the next snapshot is due."""
    good = run_simulated(recipe_of(steps=3), tmp_path)
    before = len(entries(tmp_path))
    weights = {name: value.clone() for name, value in _exported(tmp_path).items()}

    def spoil(lead: Lead) -> None:
        """From its first commit on, the lead orders a learning rate at which weights overflow."""
        tell = lead.tell

        async def telling(peer, topic, facts, step) -> None:
            wild = msgspec.structs.replace(facts, rates=(1e37,) * len(facts.rates)) if topic == "commit" else facts
            await tell(peer, topic, wild, step)

        lead.tell = telling

    with pytest.raises(TalkootError, match="training diverged") as caught:
        run_simulated(recipe_of(steps=9, checkpoint_every=6), tmp_path, started=spoil)
    assert caught.value.code == Exit.BAD_INPUT
    assert "not applied" in caught.value.why
    assert "the snapshot of step 3 is intact" in caught.value.next
    assert len(entries(tmp_path)) > before
    assert good.state_hash == read_manifest(manifests(tmp_path)[0]).state_hash
    assert all(torch.equal(weights[name], value) for name, value in _exported(tmp_path).items())


def _exported(folder: Path) -> dict[str, torch.Tensor]:
    export_run(folder, folder / "export")
    return {name: p.detach() for name, p in load_model(folder / "export").tensors().items()}


def doctored(tmp_path: Path) -> Path:
    """The small model with one weight that is infinite."""
    model = load_model(model_folder(False))
    tensors = {name: p.detach().clone() for name, p in model.tensors().items()}
    tensors["lm_head.weight"][5, 3] = torch.inf
    folder = tmp_path / "doctored"
    save_folder(folder, model.config, tensors, Tokenizer.bytes(), dtype=torch.float32)
    return folder


@pytest.mark.parametrize("at_once", [True, False])
def test_a_loss_or_gradient_that_is_no_number_is_named_and_the_step_is_not_in_the_log(at_once, tmp_path):
    recipe = recipe_of(checkpoint_every=1, keep_checkpoints=1)
    if at_once:
        recipe = replace(recipe, "model", load=str(doctored(tmp_path)))
    else:
        recipe = replace(recipe, "train", learning_rate=1e37, warmup=0)
    log = Log(tmp_path / "log.sqlite")
    with pytest.raises(TalkootError, match="training diverged") as caught:
        simulate(recipe, tmp_path, log=log)
    state = fold(log.entries())["train"]
    log.close()
    assert state.step == (0 if at_once else 1)
    assert f"step {state.step} of run" in caught.value.where
    assert ("the snapshot of step 1 is intact" in caught.value.next) is not at_once
    assert verify(tmp_path / "log.sqlite").steps == state.step


def test_without_respawn_the_other_replica_goes_on_alone(tmp_path):
    recipe = replace(tiny(2, 2, (Fault(peer="birch", step=1, phase="mix"),)), "swarm", respawn=False)
    run = simulate(recipe)
    assert run.result.state_hash == simulate(tiny(1, 1)).result.state_hash
    last = run.facts("train.commit", Committed)[-1]
    assert {path[0] for path in last.paths} == {"alder"}
    assert {path[1] for path in last.paths} == {"cedar", "dogwood"}


@pytest.mark.parametrize("ladder", [("replica", "checkpoint"), ("replica",), ("checkpoint",)])
def test_without_respawn_an_empty_stage_is_named_and_how_to_go_on(ladder, tmp_path):
    faults = tuple(Fault(peer=name, step=3, phase="backward") for name in ("cedar", "dogwood"))
    recipe = replace(replace(tiny(2, 2, faults), "swarm", respawn=False), "recovery", ladder=ladder)
    with pytest.raises(TalkootError) as caught:
        simulate(recipe, tmp_path)
    assert caught.value.code == Exit.UNREACHABLE
    assert "[1]" in str(caught.value)
    assert ("respawn" in caught.value.next) or ("recovery.ladder" in caught.value.next)


@pytest.mark.parametrize(
    "method",
    ["train.planner=strait", "train.schedule=cosin", "mixing.rule=dpp"],
)
def test_a_misspelt_method_is_refused_before_anything_is_written(method, tmp_path):
    key, _, value = method.partition("=")
    section, _, name = key.partition(".")
    recipe = replace(recipe_of(), section, **{name: value})
    with pytest.raises(TalkootError, match="unknown") as caught:
        run_simulated(recipe, tmp_path / "run")
    assert key in caught.value.where
    assert not (tmp_path / "run").exists()
    with pytest.raises(TalkootError, match="unknown"):
        rehearse(recipe, ModelConfig.from_depth(2, 300))


def kill_birch_after_each(op: str, until: int):
    def arrange(lead: Lead, simulation: Simulation) -> None:
        append = lead.journal.append

        def appending(signed):
            name, receipt = append(signed), signed.open()
            if receipt.op == op and receipt.step < until:
                simulation.loop.call_soon(lambda: simulation.kill(simulation.of("birch")))
            return name

        lead.journal.append = appending

    return arrange


def test_a_peer_that_dies_as_often_as_it_is_started_ends_the_run():
    with pytest.raises(TalkootError, match="peer birch keeps dying"):
        simulate(tiny(2, 1, steps=3), started=kill_birch_after_each("peer.seat", until=1))


def test_a_peer_that_works_between_its_losses_may_be_lost_any_number_of_times():
    run = simulate(tiny(1, 2, steps=90, microbatches=2), started=kill_birch_after_each("train.commit", until=90))
    assert run.result.state_hash == simulate(tiny(1, 1, steps=90, microbatches=2)).result.state_hash
    assert run.lead.state["peers"].lost > MAX_RESPAWNS + 5
