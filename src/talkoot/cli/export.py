"""``talkoot export``: a run's weights for everybody else's tools."""

from __future__ import annotations

from pathlib import Path

from talkoot.cli.output import blended, print_json, say
from talkoot.train.export import export_run


def run(run: Path, *, out: Path, as_json: bool) -> None:
    """Write the folder and say what it is."""
    manifest = export_run(run, out)
    if as_json:
        print_json(
            {
                "folder": str(out),
                "step": manifest.step,
                "state_hash": manifest.state_hash,
                "approximate": manifest.approximate,
            }
        )
    else:
        say(f"wrote step {manifest.step} to {out}")
        if manifest.approximate:
            say(f"approximate: {blended(manifest.approximate)}")
        say(f'load it with transformers.AutoModelForCausalLM.from_pretrained("{out}")')
