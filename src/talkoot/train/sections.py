"""The parts of a recipe: data, model, training, recovery, swarm."""

from __future__ import annotations

from typing import Literal

from talkoot.run.section import Section, peer_names
from talkoot.world.sim.simulation import PEER_FLOPS


class Data(Section, frozen=True, kw_only=True):
    """Where the text comes from.

    Attributes:
        source: ``bundled:shakespeare``, a file, a folder, or ``datasets:NAME`` (see ``talkoot.data``).
        column: the text column of JSONL, Parquet and datasets sources.
        held_out: share of the tokens, from the end, that training never sees.
        tokenizer: ``bytes``, ``bpe:SIZE`` (trained on the text), or a folder or file with a ``tokenizer.json``.
    """

    source: str = "bundled:shakespeare"
    column: str = "text"
    held_out: float = 0.05
    tokenizer: str = "bpe:1024"


class Model(Section, frozen=True, kw_only=True):
    """What is trained.

    Attributes:
        depth: the one dial for a new model; everything else derives from it.
        load: a Hugging Face folder to start from instead.
        context: tokens per training sequence.
        dtype: ``bfloat16`` computes under autocast; weights, gradients and the optimizer stay in float32.
        device: ``auto`` takes CUDA, then MPS, then the CPU.
        compile: run layers through ``torch.compile``.
    """

    depth: int = 4
    load: str | None = None
    context: int = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    compile: bool = False


class Train(Section, frozen=True, kw_only=True):
    """How it is trained.

    Attributes:
        steps: optimizer steps.
        microbatches, microbatch_size: sequences per step = their product; each microbatch takes its own path.
        learning_rate, schedule, warmup, decay, final_rate: peak rate; ``cosine`` or ``constant-decay`` (constant, then
            linear over the last ``decay`` share of the steps); warm-up steps; last rate as a share of the peak.
        weight_decay, beta1, beta2, epsilon: AdamW's; decay applies to matrices only.
        clip: limit of the global gradient norm; 0 = none.
        planner: how microbatches find their way, by name.
        visits, full_every: in a ring, stages that a microbatch visits (0 = all), and every how many steps one is
            done with all stages (0 = never).
        replan_at: plan the routes anew when a peer computes slower or faster than assumed by more than this share of
            its speed; 0 = never.
        repair: what happens to microbatches on the way when a peer is lost within a step, by name.
        checkpoint_every, keep_checkpoints: in steps; 0 = only at the end.
        evaluate_every, evaluate_batches: held-out evaluation; 0 = only at the end.
        patience_s: seconds without any progress after which the run stops with a diagnosis.
    """

    steps: int = 300
    microbatches: int = 8
    microbatch_size: int = 4
    learning_rate: float = 3e-3
    schedule: str = "cosine"
    warmup: int = 20
    decay: float = 0.2
    final_rate: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float = 1.0
    planner: str = "straight"
    visits: int = 0
    full_every: int = 0
    replan_at: float = 0.0
    repair: str = "repair"
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluate_every: int = 100
    evaluate_batches: int = 8
    patience_s: float = 300.0


class Mixing(Section, frozen=True, kw_only=True):
    """How replicas become one model; see ``docs/mixing.md``. What is left open (None) is the rule's own choice.

    Attributes:
        rule: by name. ``ddp`` agrees on every step's gradient; all others let each replica, a whole model, take
            ``inner_steps`` by itself in between.
        inner_steps: of a replica of speed 1 in one round; slower ones take fewer where ``balance`` is on.
        balance: give each replica as many inner steps as make rounds take equal time.
        outer_rate, momentum, pull: the outer optimizer's: beta, alpha and gamma of the literature.
        wire, wire_gradient: how numbers travel: those that carry weights, and those that only carry progress.
        fragments: parts of the model, by layer, that are mixed at different times of the round.
        overlap: inner steps that are taken between sending and merging.
        keep: how much of the fast weights survives a merge; the rest is the new slow weights.
        density, feedback: share of the numbers that ``sparseloco`` sends, and what its residual keeps per round.
        collective: how a group of all forms its mean: along a ``ring``, up and down a ``tree``, or ``direct``.
        deadline_s: longest wait for a partner that seems alive; None = adapts to how long they usually take.
        joiner_donors: replicas whose mean a newcomer starts from.
        distance: a partner whose message is further away than this many times the usual is not merged.
    """

    rule: str = "ddp"
    inner_steps: int = 50
    balance: bool = True
    outer_rate: float | None = None
    momentum: float | None = None
    pull: float | None = None
    wire: Literal["float32", "bfloat16", "int8"] = "float32"
    wire_gradient: Literal["float32", "bfloat16", "int8"] = "float32"
    fragments: int | None = None
    overlap: int | None = None
    keep: float | None = None
    density: float = 1 / 64
    feedback: float = 0.95
    collective: Literal["ring", "tree", "direct"] = "ring"
    deadline_s: float | None = None
    joiner_donors: int = 1
    distance: float = 10.0


class Recovery(Section, frozen=True, kw_only=True):
    """What happens when nobody is left who holds a stage; see ``docs/recovery.md``.

    Attributes:
        ladder: recovery rungs by name, in the order in which they are tried.
        copies: peers of other stages that keep what ``shadow`` and ``journal`` need of each stage.
        guarded: the stages kept that way; empty = all.
        stream: what gradients are rounded to before they are kept elsewhere, and applied.
        refresh_every: every how many steps ``journal`` takes a new state of the stage as its base.
        merge: what ``blend`` makes a lost stage of: its neighbours weighed by their gradients' ``norm``, their
            ``uniform`` mean, a ``copy`` of one, or fresh ``random`` weights.
        omega_power: exponent of those norms.
        moments: the optimizer moments of a blended stage: ``reset``, the mean of its ``neighbours``' second moments, or
            ``exact`` where somebody keeps them (an ablation: who keeps them keeps the weights as well).
        bump, bump_decay: factor on the learning rate of a blended stage, and by how much of itself its excess over 1
            shrinks with each step.
        failures_per_hour: how often a stage is expected to be lost; above 0, snapshots are taken as often as is best
            then (Young, 1974; Daly, 2006), whatever ``train.checkpoint_every`` says.
        watchdog_s: seconds without progress after which peers are asked for a sign of life; at least three times what
            progress usually takes.
    """

    ladder: tuple[str, ...] = ("replica", "checkpoint")
    copies: int = 1
    guarded: tuple[int, ...] = ()
    stream: Literal["float32", "bfloat16"] = "float32"
    refresh_every: int = 50
    merge: Literal["norm", "uniform", "copy", "random"] = "norm"
    omega_power: int = 1
    moments: Literal["reset", "neighbours", "exact"] = "neighbours"
    bump: float = 1.1
    bump_decay: float = 0.0
    failures_per_hour: float = 0.0
    watchdog_s: float = 10.0


KEPT = ("shadow", "journal")  # the rungs for which peers keep stages of others


def needs_keepers(recovery: Recovery) -> bool:
    """Whether any rung of the ladder does."""
    return not set(KEPT).isdisjoint(recovery.ladder)


class Joiner(Section, frozen=True, kw_only=True):
    """A peer that comes later and is given a stage where it helps, or waits until it does.

    Attributes:
        name: unique.
        step: when it comes, in committed steps.
        speed, slots: as for the others.
    """

    name: str
    step: int = 0
    speed: float = 1.0
    slots: int = 0


class Swarm(Section, frozen=True, kw_only=True):
    """Who trains it.

    Attributes:
        stages, replicas: the pipeline's length and the number of peers that hold each stage.
        cut: decoder blocks of each stage; empty = balanced by cost. A ring's first stage may have none.
        layout: ``line``: the last stage computes the loss; ``ring``: the first one, to which every path returns.
        groups: peers of each stage, where stages have unlike numbers of them; it replaces stages and replicas.
        names, speeds: per peer, stage by stage; names are trees where none are given, missing speeds are 1.
        slots: how many microbatches a peer of a ring can hold at once, for all or per peer; 0 = any number.
        flops: floating-point operations per second of a peer of speed 1 in the simulated world.
        emulate: in the real world, delay messages like the network section's links and computations like ``flops``.
        joiners: peers that come later.
        respawn: start a replacement when a peer is lost.
        standbys: 1 = a second process follows the log and leads on if the lead is lost; 0 = none does.
        threads: torch threads per peer.
        host: address that peers listen on; anything but loopback is encrypted.
    """

    stages: int = 2
    replicas: int = 2
    cut: tuple[int, ...] = ()
    layout: Literal["line", "ring"] = "line"
    groups: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    slots: int | tuple[int, ...] = 0
    flops: float = PEER_FLOPS
    emulate: bool = False
    joiners: tuple[Joiner, ...] = ()
    respawn: bool = True
    standbys: int = 0
    threads: int = 1
    host: str = "127.0.0.1"

    def speed(self, index: int) -> float:
        """Speed of the peer with that index."""
        return self.speeds[index] if index < len(self.speeds) else 1.0

    def slots_of(self, index: int) -> int:
        """Microbatches that the peer with that index can hold at once; 0 = any number."""
        return self.slots if isinstance(self.slots, int) else self.slots[index]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of peers of each stage."""
        return self.groups or (self.replicas,) * self.stages

    @property
    def num_stages(self) -> int:
        """The pipeline's length."""
        return len(self.sizes)

    @property
    def peers(self) -> dict[str, int]:
        """Every peer's name and stage, stage by stage."""
        stages = [stage for stage, size in enumerate(self.sizes) for _ in range(size)]
        names = self.names or tuple(peer_names(len(stages)))
        return dict(zip(names, stages, strict=False))
