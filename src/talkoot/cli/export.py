"""``talkoot export``: a run's weights for everybody else's tools."""

from __future__ import annotations

from pathlib import Path

from talkoot.cli.output import blended, print_json, say
from talkoot.core.errors import TalkootError
from talkoot.core.log import Log
from talkoot.run.folder import LOG
from talkoot.run.records import Start


def run(run: Path, *, out: Path, peer: str | None, as_json: bool) -> None:
    """Write the folder and say what it is."""
    if _is_post_training(run):
        from talkoot.tune.export import export_policy

        name, round_number = export_policy(run, out, peer)
        facts = {"folder": str(out), "peer": name, "round": round_number}
        lines = [f"wrote {name} after round {round_number} to {out}"]
    elif peer is not None:
        raise TalkootError(
            "a training run has one model",
            where="--peer",
            why=f"{run} holds a training run, whose peers make one model together",
            next="leave --peer out",
        )
    else:
        facts, lines = _trained(run, out)
    if as_json:
        print_json(facts)
        return
    for line in lines:
        say(line)
    say(f'load it with transformers.AutoModelForCausalLM.from_pretrained("{out}")')


def _trained(run: Path, out: Path) -> tuple[dict[str, object], list[str]]:
    from talkoot.train.export import export_run

    manifest = export_run(run, out)
    facts: dict[str, object] = {
        "folder": str(out),
        "step": manifest.step,
        "state_hash": manifest.state_hash,
        "approximate": manifest.approximate,
    }
    lines = [f"wrote step {manifest.step} to {out}"]
    return facts, [*lines, f"approximate: {blended(manifest.approximate)}"] if manifest.approximate else lines


def _is_post_training(run: Path) -> bool:
    log = Log(run / LOG, readonly=True)
    try:
        first = next(log.entries(1, 1), None)
    finally:
        log.close()
    return first is not None and "tune" in first.receipt.read(Start).recipe
