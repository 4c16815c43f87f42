"""``talkoot tune``: post-train policies with each other's completions, for real or in virtual time; it resumes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from talkoot.cli.output import print_json, print_table, say
from talkoot.cli.status_tune import rounds_of
from talkoot.core.errors import Exit
from talkoot.core.fold import Entry, State
from talkoot.recipes.unlike import unlike
from talkoot.run.folder import folder_name
from talkoot.run.records import Gone, Joined, Warned
from talkoot.tune.recipe import load_tune_recipe
from talkoot.tune.records import Updated, Viewed


def run(*, recipe: Path | None, sets: tuple[str, ...], sim: bool, out: Path | None, as_json: bool) -> None:
    """Run the verb."""
    loaded = load_tune_recipe(recipe, sets, unlike())
    name = folder_name(loaded.name if recipe is None or loaded.name != "tune" else recipe.stem)
    folder = out or Path("runs") / (f"{name}-sim" if sim else name)
    from talkoot.tune.run import run_real, run_simulated

    loaded.check()
    warm = [name for name in loaded.names if loaded.warm_of(name).steps]
    if warm and not as_json:
        say(f"{', '.join(warm)}: warmed up on demonstrations first, which may take a minute or more")
    progress = TuneProgress(loaded.tune.rounds, loaded.names, quiet=as_json)
    result = (run_simulated if sim else run_real)(loaded, folder, progress)
    if as_json:
        print_json({"folder": str(folder), "world": "simulated" if sim else "real", **msgspec.to_builtins(result)})
    else:
        done = "already finished: nothing was done" if result.already else "finished"
        say(f"{done if result.finished else 'interrupted'} after {result.round} rounds in {folder}")
        print_table(
            [
                (
                    peer,
                    rounds_of(account),
                    f"{account['rewards'] / max(1, account['updates']):.3f}",
                    f"{account['generated']:,}",
                    f"{account['trained']:,}",
                    account["alone"],
                    _scores(account["evaluations"]),
                )
                for peer, account in result.peers.items()
            ],
            ("peer", "rounds", "mean reward", "generated", "trained", "alone", "latest scores (greedy)"),
        )
        again = "" if result.finished else "the same command resumes   or   "
        say(f"next: {again}talkoot report {folder}   or   talkoot export {folder} MODEL_FOLDER --peer NAME")
    if not result.finished:
        sys.exit(Exit.INTERRUPTED)


def _scores(evaluations: list[dict[str, object]]) -> str:
    return ", ".join(f"{one['split']} {one['greedy']:.3f}" for one in evaluations) or "-"


class TuneProgress:
    """An observer of a run's log that prints a line per round, and what deserves one of its own.

    Args:
        rounds: total.
        names: all peers'.
        quiet: print nothing.
    """

    def __init__(self, rounds: int, names: tuple[str, ...], *, quiet: bool) -> None:
        self._rounds, self._names, self._quiet = rounds, names, quiet
        self._live = sys.stderr.isatty()
        self._latest: dict[str, Updated] = {}
        self._shown, self._printed = -1, 0.0
        self._started, self._first = time.monotonic(), 0

    def __call__(self, entry: Entry, state: State) -> None:
        if self._quiet:
            return
        receipt = entry.receipt
        match receipt.op:
            case "tune.update":
                self._update(state["tune"].names.get(receipt.peer, receipt.peer[:8]), receipt.read(Updated), state)
            case "tune.view":
                viewed = receipt.read(Viewed)
                if viewed.number == 1:
                    self._started, self._first = time.monotonic(), state["tune"].round
                    names = [name for name, _ in viewed.places]
                    if names:  # nobody was ready when the run was stopped
                        say(f"round {self._first}: {', '.join(names)}" + (" alone" if len(names) == 1 else ""))
            case "peer.join" if state["tune"].view:
                say(f"round {receipt.step}: {receipt.read(Joined).name} is here")
            case "peer.lost":
                gone = receipt.read(Gone)
                say(f"round {receipt.step}: lost {gone.name} ({gone.reason})")
            case "tune.rollback":
                say(f"back to round {receipt.step}: the newest of which all states are stored")
            case "run.warning":
                say(f"warning: {receipt.read(Warned).text}")

    def _update(self, name: str, facts: Updated, state: State) -> None:
        self._latest[name] = facts
        done = state["tune"].round
        now = time.monotonic()
        due = 0.0 if facts.evaluations or done >= self._rounds else 1.0 if self._live else 10.0
        if done <= self._shown or (now - self._printed < due and done > 1):
            return
        self._shown, self._printed = done, now
        left = (now - self._started) / max(1, done - self._first) * (self._rounds - done)
        ahead = f"   ETA {left:.0f} s" if done > self._first else ""
        parts = [_words(peer, latest) for peer, latest in sorted(self._latest.items())]
        say(f"round {done}/{self._rounds}  {'   '.join(parts)}{ahead}")


def _words(name: str, facts: Updated) -> str:
    text = f"{name} reward {facts.reward:.2f}"
    if facts.evaluations:
        text += f" ({', '.join(f'{one.split} {one.greedy:.2f}' for one in facts.evaluations)})"
    if facts.reason:
        text += f" ({facts.reason})"
    if facts.rejected:
        text += f" refused {sum(facts.rejected.values())}"
    if facts.absent:
        text += f" without {', '.join(facts.absent)}"
    return text
