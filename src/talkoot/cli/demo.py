"""``talkoot demo``: a real job, a real loss of a peer, and a table that says what held."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from talkoot.cli.output import Progress, print_json, print_table, say
from talkoot.core.errors import Exit, TalkootError
from talkoot.recipes.demo import demo
from talkoot.run.folder import LOG
from talkoot.train.chaos import with_chaos
from talkoot.train.export import export_run
from talkoot.train.loop import Result
from talkoot.train.run import run_real, run_simulated
from talkoot.train.verify import verify

LOSS_BOUND = 4.3  # nats per token, held out, default steps; an untrained model has ln(1024) = 6.93
LOGIT_BOUND = 1e-4
PROMPT = "KING. "

Check = tuple[str, str, bool]  # what was checked, what was found, whether it holds


def run(*, sim: bool, seed: int, steps: int, chaos: Path | None, out: Path | None, as_json: bool) -> None:
    """Run the verb; exits with 4 when a check fails."""
    started = time.monotonic()
    folder = out or Path(tempfile.mkdtemp(prefix="talkoot-demo-"))
    if (folder / LOG).exists():
        raise TalkootError(
            "the demo starts from nothing",
            where=str(folder),
            why="it holds a run already",
            next="choose another folder with --out, or leave --out away",
        )
    recipe = with_chaos(demo(seed=seed, steps=steps), chaos)
    if not as_json:
        say(
            f"talkoot demo: {recipe.swarm.stages} stages x {recipe.swarm.replicas} replicas, {steps} steps, "
            f"{'simulated' if sim else 'real processes'}; one peer will be killed. Folder: {folder}"
        )
    progress = Progress(steps, quiet=as_json)
    result = (run_simulated if sim else run_real)(recipe, folder, progress)
    progress.end()
    if not result.finished:
        say(f"interrupted after {result.step} of {steps} steps; a demo starts from nothing, {folder} can go")
        sys.exit(Exit.INTERRUPTED)
    model = folder / "model"
    checks = [*_training(result, folder, steps, chaos is None), *_export(folder, model)]
    sample = _sample(model)
    report = _report(folder)
    seconds = time.monotonic() - started
    passed = all(holds for _, _, holds in checks)
    if as_json:
        print_json(
            {
                "passed": passed,
                "world": "simulated" if sim else "real",
                "seconds": round(seconds, 1),
                "state_hash": result.state_hash,
                "log_hash": result.log_hash,
                "loss": result.loss,
                "held_out": result.held_out,
                "checks": [{"check": what, "found": found, "holds": holds} for what, found, holds in checks],
                "folder": str(folder),
                "model": str(model),
                "report": report,
                "sample": sample,
            }
        )
    else:
        print_table([("PASS" if holds else "FAIL", what, found) for what, found, holds in checks])
        say(f"\nthe model continues {PROMPT!r}:\n{sample}\n")
        say(f"{'all checks pass' if passed else 'SOME CHECKS FAIL'} in {seconds:.0f} s; state {result.state_hash[:16]}")
        say(f"report: {report}\nmodel:  {model}\nlive:   talkoot watch {folder}")
    if not passed:
        sys.exit(Exit.FAILED_CHECK)


def _training(result: Result, folder: Path, steps: int, single: bool) -> list[Check]:
    found = verify(folder / LOG)
    held_out = result.held_out if result.held_out is not None else math.inf
    start = math.log(1024)
    killed = ", ".join(found.lost) or "nobody"
    return [
        (f"held-out loss below {LOSS_BOUND} (untrained: {start:.2f})", f"{held_out:.3f}", held_out < LOSS_BOUND),
        ("one peer was killed", killed, len(found.lost) == 1)
        if single
        else ("peers were killed", killed, killed != "nobody"),
        ("it was replaced, and the run went on", f"{found.steps} of {steps} steps", found.replaced == found.lost),
        (
            "each microbatch is in exactly one committed step",
            found.faults[0] if found.faults else f"{found.steps} steps checked",
            not found.faults and found.steps == steps,
        ),
        ("every receipt's signature and the hash chain verify", f"{found.receipts} receipts", found.receipts > 0),
    ]


def _export(folder: Path, model: Path) -> list[Check]:
    what = f"the exported folder loads in transformers, logits within {LOGIT_BOUND:g}"
    export_run(folder, model)
    difference = transformers_difference(model)
    if difference is None:
        return [(what, "transformers is not installed: pip install 'talkoot[hf]'", False)]
    return [(what, f"{difference:.1e}", difference <= LOGIT_BOUND)]


def transformers_difference(model: Path) -> float | None:
    """Largest difference between our logits and transformers' on the same tokens; None without transformers."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        return None
    import torch

    from talkoot.model.huggingface import load_model

    logging.disable_progress_bar()
    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(model)(PROMPT * 8, return_tensors="pt").input_ids
    with torch.no_grad():
        return float((theirs(ids).logits - load_model(model)(ids)).abs().max())


def _sample(model: Path) -> str:
    import torch

    from talkoot.model.generate import generate
    from talkoot.model.huggingface import load_model
    from talkoot.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model)
    prompt = tokenizer.encode(PROMPT)
    drawn = generate(load_model(model), torch.tensor([prompt]), 60, temperature=0.7, top_k=40, seed=1)
    return PROMPT + tokenizer.decode([token.token for token in drawn[0]])


def _report(folder: Path) -> str:
    from talkoot.serve.report import write_report

    return str(write_report(folder))
