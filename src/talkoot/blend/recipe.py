"""A run that makes experts, as data: one typed tree that TOML files and flags fill in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from talkoot.blend.folder import check_name
from talkoot.core.codec import decode, encode
from talkoot.core.errors import TalkootError, nearest
from talkoot.core.plain import CORRECT, build, read_overridden
from talkoot.model.config import ModelConfig
from talkoot.model.hf_config import load_config
from talkoot.plan.experts import CLASSES, allocations
from talkoot.run.peers import PeerEntry, check_faults, named
from talkoot.run.section import Rule, Section
from talkoot.world.faults import Fault
from talkoot.world.links import Network

UNUSABLE = "the recipe cannot be used"
SIZES = ("small", "medium", "large")
MOST_DOMAINS = 256
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

    def rules(self) -> Iterable[Rule]:
        yield "context", self.context >= 2, "at least 2"
        yield "sizes", set(self.sizes) <= set(SIZES), f"by {', '.join(SIZES)}"


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

    def rules(self) -> Iterable[Rule]:
        yield "steps", self.steps >= 0, "at least 0"
        yield "learning_rate", 0 < self.learning_rate < math.inf, "a finite number above 0"
        yield "megabytes", 0 <= self.megabytes < math.inf, "at least 0"


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

    def rules(self) -> Iterable[Rule]:
        for name in ("steps", "batch", "checkpoint_every", "evaluate_windows"):
            yield name, getattr(self, name) >= 1, "at least 1"
        yield "horizon", self.horizon >= 0, "at least 0"
        yield "warmup", 0 <= self.warmup <= self.span, f"from 0 to the horizon ({self.span})"
        yield "trial_steps", self.trial_steps >= 4, "at least 4"
        yield "shift", 0 <= self.shift < 1, "from 0 to below 1"
        yield "learning_rate", 0 < self.learning_rate < math.inf, "a finite number above 0"
        _ = allocations[self.allocation]  # a misspelt name is an error of its own

    @property
    def span(self) -> int:
        """Steps that every expert's schedule spans."""
        return self.horizon or self.steps + (self.steps + 1) // 2


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

    def rules(self) -> Iterable[Rule]:
        yield "patience_s", 0 < self.patience_s < math.inf, "above 0"
        yield "threads", 1 <= self.threads <= 1024, "from 1 to 1024"


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

    KEY = "domains"

    def rules(self) -> Iterable[Rule]:
        yield "difficulty", self.difficulty in ("", *CLASSES), f"one of {', '.join(CLASSES)}, or empty"
        yield "pieces", self.pieces >= 0, "at least 0"
        yield "megabytes", 0 <= self.megabytes < math.inf, "at least 0"


class BlendRecipe(Section, frozen=True, kw_only=True, dict=True):
    """A whole run."""

    name: str = "blend"
    seed: int = 0
    model: Model = Model()
    general: General = General()
    experts: Experts = Experts()
    run: Run = Run()
    domains: tuple[Domain, ...] = ()
    peers: tuple[PeerEntry, ...] = (PeerEntry(), PeerEntry())
    network: Network = Network()
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise _bad("seed", f"it is {self.seed}, it must be a 64-bit integer")
        if not 1 <= len(self.domains) <= MOST_DOMAINS:
            raise _bad("domains", f"there are {len(self.domains)}, and 1 to {MOST_DOMAINS} can be had")
        names = [domain.name for domain in self.domains]
        for domain in self.domains:
            check_name(domain.name)
            if names.count(domain.name) > 1:
                raise _bad("domains", f"two domains are called {domain.name!r}")
            if domain.peer and domain.peer not in self.names:
                raise _bad(f"domains.{domain.name}.peer", f"there is none; {nearest(domain.peer, self.names)}")
        check_faults(self.faults, self.names, PHASES)

    @cached_property
    def _by_name(self) -> dict[str, PeerEntry]:
        return named(self.peers)

    @property
    def names(self) -> tuple[str, ...]:
        """All peers' names."""
        return tuple(self._by_name)

    def peer(self, name: str) -> PeerEntry:
        """A peer's entry."""
        return self._by_name[name]

    def domain(self, name: str) -> Domain:
        """A domain's entry."""
        return next(domain for domain in self.domains if domain.name == name)

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


def load_blend_recipe(
    path: Path | None, overrides: tuple[str, ...] = (), default: Mapping[str, Any] = MappingProxyType({})
) -> BlendRecipe:
    """Read a TOML recipe and apply ``section.key=value`` overrides.

    Args:
        default: what stands in for a file.

    Raises:
        TalkootError: unreadable file, broken TOML, an unknown key or a wrong type.
    """
    tree = read_overridden(path, overrides, UNUSABLE, default)
    return build(tree, BlendRecipe, what=UNUSABLE, where="the command line" if path is None else str(path))


def _bad(where: str, why: str) -> TalkootError:
    return TalkootError(UNUSABLE, where=where, why=why, next=CORRECT)
