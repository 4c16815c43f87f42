"""``talkoot blend``: experts trained apart, and what is made of them; each verb below it leaves a whole blend."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec

from talkoot.blend.folder import MANIFEST, ROUTER, Blend, check_name
from talkoot.blend.recipe import load_blend_recipe
from talkoot.blend.train.records import Done, Planned, Sliced
from talkoot.cli.output import print_json, print_table, say
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import Entry, State
from talkoot.recipes.two_experts import two_experts
from talkoot.run.folder import folder_name
from talkoot.run.records import Gone

NEXT = ("blend route", "blend upcycle", "serve")


def train(*, recipe: Path | None, sets: tuple[str, ...], sim: bool, out: Path | None, as_json: bool) -> None:
    """Train experts, or go on with a run that was interrupted."""
    loaded = load_blend_recipe(recipe, sets, two_experts())
    name = folder_name(loaded.name if recipe is None or loaded.name != "blend" else recipe.stem)
    folder = out or Path("runs") / (f"{name}-sim" if sim else name)
    from talkoot.blend.train.run import train_experts

    result = train_experts(loaded, folder, simulated=sim, observer=BlendProgress(quiet=as_json))
    if as_json:
        print_json({"folder": str(folder), "world": "simulated" if sim else "real", **msgspec.to_builtins(result)})
    else:
        done = "already finished: nothing was done" if result.already else "finished"
        say(f"{done if result.finished else 'interrupted'} in {folder}, {result.busy_s:,.0f} s of work")
        if result.finished:
            show_losses(result.losses)
            say("next: " + "   or   ".join(f"talkoot {verb} {folder}" for verb in NEXT))
        else:
            say("next: the same command resumes")
    if not result.finished:
        sys.exit(Exit.INTERRUPTED)


def show_losses(losses: dict[str, dict[str, float]]) -> None:
    """The cross table: perplexity of each expert on each domain's held-out text; a star marks the best of a row."""
    names = list(losses)
    rows = []
    for domain in names:
        found = losses[domain]
        best = min(found, key=lambda expert: found[expert])
        rows.append((domain, *(f"{math.exp(min(found[one], 99)):.1f}{'*' if one == best else ''}" for one in names)))
    print_table(rows, ("held-out perplexity", *(f"by {name}" for name in names)))


def show(folder: Path, *, as_json: bool) -> None:
    """What a blend holds."""
    blend = Blend.open(folder)
    if as_json:
        print_json(msgspec.to_builtins(blend.manifest))
        return
    print_table(
        [
            (
                expert.name,
                f"{expert.parameters:,}",
                expert.trained.get("steps", "-"),
                expert.trained.get("weights", "-"),
                "yes" if expert.statistics else "no",
                expert.source or "-",
                expert.model,
            )
            for expert in blend
        ]
        or [("(none yet)", *[""] * 6)],
        ("expert", "parameters", "steps", "trained", "statistics", "text", "folder"),
    )
    if blend.manifest.general:
        print(f"\nfor text that no expert knows: {blend.manifest.general}")


def add(
    folder: Path,
    name: str,
    model: Path,
    *,
    text: str | None,
    column: str,
    megabytes: float,
    statistics: Path | None,
    as_json: bool,
) -> None:
    """Add an expert."""
    from talkoot.blend import changes

    if text is not None and statistics is not None:
        raise TalkootError(
            "one source of statistics is enough",
            where="--text and --statistics",
            why="both were given",
            next="leave one of them out",
        )
    own = None if text is None else changes.Text(source=text, column=column, megabytes=megabytes)
    known = (folder / MANIFEST).exists() and name in Blend.open(folder).names
    router = changes.add_expert(folder, name, model, text=own, statistics=statistics)
    if as_json:
        print_json({"replaced" if known else "added": name, "router": router.version if router else ""})
        return
    say(
        f"{'replaced' if known else 'added'} {name} {'in' if known else 'to'} {folder}"
        + (f"; the router knows {len(router.names)} domains now" if router else "")
    )
    if text is None and statistics is None:
        say("it is served by its name; give --text or --statistics, and prompts are routed to it, too")


def remove(folder: Path, name: str, *, as_json: bool) -> None:
    """Strike an expert off."""
    from talkoot.blend import changes

    changes.remove_expert(folder, name)
    if as_json:
        print_json({"removed": name})
    else:
        say(f"removed {name} from {folder}; its files stay")


def count(
    folder: Path, name: str, *, text: str, column: str, megabytes: float, out: Path, key: Path | None, as_json: bool
) -> None:
    """Count a domain's text for a blend, without showing it anybody."""
    from talkoot.blend import changes
    from talkoot.blend.text import split_source
    from talkoot.run.folder import lead_key

    check_name(name)
    own = lead_key(key if key is not None else out.with_suffix(".key"))
    split = split_source(text, column, megabytes=megabytes)
    counted = changes.count_text(name, split.train, changes.features_of(folder), own)
    counted.write(out, own)
    if as_json:
        print_json({"file": str(out), "documents": counted.documents, "tokens": counted.tokens, "signer": own.peer})
        return
    say(f"wrote {out}: {counted.tokens:,} tokens of {counted.documents:,} documents, signed by {own.peer[:8]}")
    say("it tells others how often each token and pair of tokens occurs, exactly; nothing else of the text")


def route(folder: Path, *, rule: str, prompt: str | None, as_json: bool) -> None:
    """Fit the router, or ask the one that is there where a prompt goes."""
    from talkoot.blend import changes
    from talkoot.blend.router import Router

    if prompt is not None:
        decision = Router.load(folder / ROUTER).route_text(prompt)
        if as_json:
            print_json(msgspec.to_builtins(decision))
            return
        print_table([(name, f"{score:.4f}") for name, score in decision.scores.items()], ("expert", "probability"))
        if decision.known:
            print(f"\nto {decision.expert}")
        else:
            print(f"\nto the general model: it is unlike all that these experts know ({decision.expert} is nearest)")
        return
    router, accuracy = changes.route(folder, rule)
    if as_json:
        facts = {"router": router.version, "rule": router.rule, "domains": router.names, "accuracy": accuracy}
        print_json(facts)
        return
    if accuracy:
        rows = sorted(accuracy.items(), key=lambda pair: -pair[1])
        print_table([(name, f"{share:.1%}") for name, share in rows], ("rule", "held-out prompts right"))
    say(f"router {router.version[:8]} by rule '{router.rule}' over {', '.join(router.names)}")
    if not router.is_calibrated:
        say("not calibrated: some expert's held-out text is not here, so nothing counts as unknown")
    say(f'next: talkoot blend route {folder} --prompt "..."   or   talkoot serve {folder}')


def upcycle(folder: Path, *, gate: str, top_k: int, trunk: str, format: str, tokens: int, as_json: bool) -> None:
    """Fuse the experts into one mixture."""
    from talkoot.blend import changes

    made = changes.upcycle(folder, gate=gate, top_k=top_k, trunk=trunk, format=format, tokens=tokens)
    if as_json:
        print_json(msgspec.to_builtins(made))
        return
    say(f"wrote {made.folder}: {len(made.strays)} experts, gate '{made.gate}', format '{made.format}'")
    if made.condition:
        say(f"worst condition number of a gate's system: {made.condition:,.0f}")
    strayed = {name: count for name, count in made.strays.items() if count}
    if strayed:
        told = ", ".join(f"{name} ({count} tensors)" for name, count in strayed.items())
        say(f"not exact: these experts changed the trunk that they share, and lose by it: {told}")
    else:
        say("exact: forced to one expert, it is that expert, bit for bit")
    loader = "talkoot serve" if made.format == "custom" else "transformers, vLLM and talkoot serve"
    say(f"{loader} can load it")


class BlendProgress:
    """An observer of a run's log that prints what is done.

    Args:
        quiet: print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, entry: Entry, state: State) -> None:
        if self._quiet:
            return
        receipt, names = entry.receipt, state["blend"].names
        who = names.get(receipt.peer, receipt.peer[:8])
        match receipt.op:
            case "blend.slice":
                facts = receipt.read(Sliced)
                say(f"{facts.job}: step {facts.steps}, loss {facts.loss:.4f} ({who})")
            case "blend.done":
                facts = receipt.read(Done)
                loss = facts.losses.get("validation")
                say(f"{facts.job}: done ({who})" + (f", held-out loss {loss:.4f}" if loss is not None else ""))
            case "blend.plan":
                planned = receipt.read(Planned)
                classes = {one.domain: one.difficulty for one in planned.classes}
                told = [f"{one.domain} ({classes[one.domain]}) {one.size}, {one.steps} steps" for one in planned.plan]
                off = abs(planned.flops / planned.budget - 1)
                say(f"planned '{planned.allocation}': {'; '.join(told)}; compute within {off:.2%} of equal")
            case "peer.lost":
                gone = receipt.read(Gone)
                say(f"lost {gone.name} ({gone.reason})")
