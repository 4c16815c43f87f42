"""``talkoot plan``: what a recipe will do, before it does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from talkoot.cli.output import print_json, print_table
from talkoot.cli.plan_losses import losses_view, show_losses
from talkoot.cli.plan_mixing import Mixed, mixed, mixing_view, show_mixing
from talkoot.cli.plan_request import Request
from talkoot.model.config import ModelConfig
from talkoot.train.methods import check_methods
from talkoot.train.mixing import mixing_rules
from talkoot.train.prepare import cut_stages, model_config
from talkoot.train.recipe import Recipe, load_recipe
from talkoot.train.rehearse import NEVER, Rehearsal, rehearse

STATE_BYTES = 16  # float32 weight, gradient and two moments
REHEARSED_STEPS = 4


def run(request: Request, *, recipe: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Print what a recipe does; where a network is named, how it is best done there."""
    request.check()
    loaded = load_recipe(recipe, sets)
    check_methods(loaded)
    config = model_config(loaded, vocab_size=_vocabulary(loaded))
    if mixing_rules[loaded.mixing.rule].local:
        _tell(_mixed_view(loaded, config, mixed(request, loaded, config)), as_json=as_json)
        return
    if request.network is not None:
        from talkoot.cli import plan_network

        known = recipe is not None or bool(sets)
        plan_network.run(request, recipe=loaded if known else None, config=config if known else None, as_json=as_json)
        return
    short = msgspec.structs.replace(
        loaded.train, steps=REHEARSED_STEPS, checkpoint_every=NEVER, evaluate_every=0, warmup=0
    )
    rehearsal = rehearse(msgspec.structs.replace(loaded, train=short, faults=()), config)
    view = _view(loaded, config, rehearsal)
    if request.failures:
        view["recovery"] = losses_view(loaded, config, rehearsal.step_seconds)
    _tell(view, as_json=as_json)


def _tell(view: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    _show(view)
    if "mixing" in view:
        show_mixing(view["mixing"])
    if "recovery" in view:
        show_losses(view["recovery"])


def _vocabulary(recipe: Recipe) -> int:
    kind, _, size = recipe.data.tokenizer.partition(":")
    if kind == "bpe" and size.isdigit():
        return int(size)
    from talkoot.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.bytes() if recipe.data.tokenizer == "bytes" else Tokenizer.load(recipe.data.tokenizer)
    return tokenizer.vocab_size


def _view(recipe: Recipe, config: ModelConfig, rehearsal: Rehearsal) -> dict[str, Any]:
    peers = {
        name: {
            "busy_share": rehearsal.busy[name],
            "sent_bytes_per_step": rehearsal.sent_bytes[name] // REHEARSED_STEPS,
            "speed": recipe.swarm.speed(index),
        }
        for index, name in enumerate(recipe.swarm.peers)
    }
    return {
        "world": "simulated, without tensors",
        **_model_view(recipe, config, recipe.train.microbatches, STATE_BYTES),
        "peers": peers,
        **_times(recipe, rehearsal.step_seconds),
    }


def _mixed_view(recipe: Recipe, config: ModelConfig, found: Mixed) -> dict[str, Any]:
    """The same for replicas that mix after rounds; their engine is not rehearsed, but its rounds are simulated."""
    seen, mixture = found.outlook, found.mixture
    peers = {
        name: {"busy_share": 1 - idle, "sent_bytes_per_step": seen.sent_bytes_per_inner_step, "speed": speed}
        for (name, idle), speed in zip(seen.idle.items(), mixture.speeds.values(), strict=True)
    }
    return {
        "world": "computed from costs",
        **_model_view(recipe, config, found.microbatches, STATE_BYTES + found.kept_bytes),
        "peers": peers,
        **_times(recipe, seen.round_s / mixture.inner_steps),
        "mixing": mixing_view(found),
    }


def _model_view(recipe: Recipe, config: ModelConfig, microbatches: int, state_bytes: int) -> dict[str, Any]:
    """What is trained, and where; ``microbatches`` of all in a step, ``state_bytes`` per parameter."""
    train, swarm = recipe.train, recipe.swarm
    parameters, flops = config.layer_parameters(), config.layer_flops(recipe.model.context)
    tokens = microbatches * train.microbatch_size * recipe.model.context
    stages = [
        {
            "stage": index,
            "layers": [first, last - 1],
            "parameters": sum(parameters[layer] for layer in held),
            "share_of_compute": sum(flops[layer] for layer in held) / sum(flops),
            "state_bytes": state_bytes * sum(parameters[layer] for layer in held),
            "peers": [name for name, stage in swarm.peers.items() if stage == index],
        }
        for index, (first, last) in enumerate(cut_stages(config, recipe))
        for held in (config.held(first, last),)
    ]
    return {
        "model": [{"name": n, "value": value, "reason": reason} for n, value, reason in config.derivation()],
        "tokens_per_step": tokens,
        "tokens_in_run": tokens * train.steps,
        "training_flops_per_step": 3 * sum(flops) * tokens,
        "activation_bytes_per_hop": 4 * train.microbatch_size * recipe.model.context * config.width,
        "stages": stages,
    }


def _times(recipe: Recipe, step_seconds: float) -> dict[str, Any]:
    return {
        "predicted_step_seconds": step_seconds,
        "predicted_run_seconds": step_seconds * recipe.train.steps,
        "methods": {
            "planner": recipe.train.planner,
            "mixing": recipe.mixing.rule,
            "recovery": list(recipe.recovery.ladder),
        },
    }


def _show(view: dict[str, Any]) -> None:
    print_table([(row["name"], f"{row['value']:,}", row["reason"]) for row in view["model"]], ("model", "", "because"))
    print()
    rows = [
        (
            stage["stage"],
            "{}..{}".format(*stage["layers"]),
            f"{stage['parameters']:,}",
            f"{stage['share_of_compute']:.1%}",
            f"{stage['state_bytes'] / 2**20:,.1f} MiB",
            ", ".join(stage["peers"]),
        )
        for stage in view["stages"]
    ]
    print_table(rows, ("stage", "layers", "parameters", "compute", "state", "peers"))
    print()
    rows = [
        (name, peer["speed"], f"{peer['busy_share']:.0%}", f"{peer['sent_bytes_per_step'] / 1e6:,.2f} MB")
        for name, peer in view["peers"].items()
    ]
    print_table(rows, ("peer", "speed", "busy", "sent per step"))
    print()
    print_table(
        [
            ("tokens per step", f"{view['tokens_per_step']:,}"),
            ("tokens in the run", f"{view['tokens_in_run']:,}"),
            ("activation per hop", f"{view['activation_bytes_per_hop'] / 1e6:,.2f} MB"),
            (
                "methods",
                "; ".join(f"{k}: {v if isinstance(v, str) else ', then '.join(v)}" for k, v in view["methods"].items()),
            ),
            ("predicted step", f"{view['predicted_step_seconds']:.3f} s (simulated links and speeds)"),
            ("predicted run", f"{view['predicted_run_seconds']:,.0f} s"),
        ]
    )
