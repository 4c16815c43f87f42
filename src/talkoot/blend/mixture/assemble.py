"""A mixture from dense experts of one shape: their feed-forward layers side by side over one trunk.

Everything that the files' headers tell is checked before the first tensor is read: family, shape, tokenizers, missing
tensors. What they cannot tell, numbers that are not finite, is refused while reading. Gates are NaN until
`talkoot.blend.mixture.fitting` sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.model import Mixture
from talkoot.blend.mixture.names import is_gate, is_trunk, of_expert, renumbered
from talkoot.blend.mixture.trunk import trunks, unlike
from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig, tied_names
from talkoot.model.folder import Entry, check_finite
from talkoot.model.huggingface import preflight, read_tensors
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import TOKENIZER, Tokenizer

Place = Stage | Path | str  # a model in memory, or its Hugging Face folder


@dataclass(frozen=True)
class Assembly:
    """A mixture and how true it is to its experts.

    Attributes:
        mixture: gates not set yet.
        tokenizer: the experts'; None if only models in memory were given.
        strays: of each expert, tensors of its trunk that are not the mixture's to the bit; empty if there are none.
    """

    mixture: Mixture
    tokenizer: Tokenizer | None
    strays: dict[str, tuple[str, ...]]

    @property
    def exact(self) -> bool:
        """Whether every expert, when forced, is the dense expert to the bit."""
        return not any(self.strays.values())


def assemble(
    experts: Mapping[str, Place],
    seed: Place | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **choices: Any,
) -> Assembly:
    """Put dense experts together; no training, no text.

    Args:
        experts: by name, two or more, all of one shape; the width inside SwiGLU may differ.
        seed: their common ancestor, for the trunk policy ``pinned``.
        dtype: of the mixture's parameters.
        choices: ``gate``, ``top_k``, ``temperature``, ``bias``, ``renormalised``, ``trunk`` of `MixtureConfig`.

    Raises:
        TalkootError: fewer than two experts, unlike families, shapes or tokenizers, files that are missing or corrupt,
            or a tensor that is not finite.
    """
    sources = [_Source.of(name, place) for name, place in experts.items()]
    origin = None if seed is None else _Source.of("the seed", seed)
    if len(sources) < 2:
        raise _bad("a mixture needs two experts", ", ".join(experts) or "no expert", f"{len(sources)} given", "add one")
    tokenizer = _check_alike(sources if origin is None else [origin, *sources])
    first = (origin or sources[0]).config
    widths = [source.config.hidden for source in sources]
    positions = min(source.config.max_positions for source in sources)
    stored = {source.config.dtype for source in sources}
    kept = {"max_positions": positions, "dtype": stored.pop() if len(stored) == 1 else "float32"}
    config = MixtureConfig.of(first, list(experts), widths, **kept, **choices)
    seen = None if origin is None else dict(origin.read(dtype, is_trunk))
    trunk = trunks[config.trunk](seen, (dict(source.read(dtype, is_trunk)) for source in sources))
    mixture = Mixture(config, dtype=dtype)
    mine, strays = mixture.tensors(), {}
    with torch.no_grad():
        for name, value in trunk.items():
            mine[name].copy_(value)
        for number, source in enumerate(sources):
            strays[source.name] = _place(mine, trunk, source.read(dtype), number)
    return Assembly(mixture, tokenizer, strays)


def with_expert(mixture: Mixture, name: str, place: Place, tokenizer: Tokenizer | None = None) -> Assembly:
    """The mixture and one expert more, as a new mixture whose gates are not set.

    Args:
        mixture: stays as it is.
        name: of the newcomer.
        place: where it lies; of it only the feed-forward layers are taken.
        tokenizer: the mixture's, to compare; None leaves that to the caller.

    Raises:
        TalkootError: as :func:`assemble`, or the trunk is the mean of all experts and would have to be taken again.
    """
    old, source = mixture.config, _Source.of(name, place)
    _refuse_refresh(old)
    if tokenizer is not None and source.tokenizer is not None and tokenizer.digest() != source.tokenizer.digest():
        raise _other_tokenizer("the mixture", tokenizer, name, source.tokenizer)
    if differences := unlike(old, source.config):
        raise _bad("the expert does not fit the mixture", name, "; ".join(differences), "give one of the same shape")
    grown = _changed(old, [*old.experts, name], [*old.widths, source.config.hidden])
    fresh = _copied(mixture, grown, {number: number for number in range(len(old.experts))})
    trunk, mine = {key: value.detach() for key, value in fresh.trunk().items()}, fresh.tensors()
    with torch.no_grad():
        stray = _place(mine, trunk, source.read(next(iter(trunk.values())).dtype), len(old.experts))
    return Assembly(fresh, source.tokenizer or tokenizer, {name: stray})


def without_expert(mixture: Mixture, name: str) -> Mixture:
    """The mixture without one expert, as a new mixture whose gates are not set.

    Raises:
        TalkootError: there is none of that name, too few are left, or as :func:`with_expert`.
    """
    old = mixture.config
    _refuse_refresh(old)
    gone = old.index(name)
    left = [number for number in range(len(old.experts)) if number != gone]
    shrunk = _changed(old, [old.experts[n] for n in left], [old.widths[n] for n in left])
    return _copied(mixture, shrunk, {number: place for place, number in enumerate(left)})


def _changed(old: MixtureConfig, experts: list[str], widths: list[int]) -> MixtureConfig:
    top_k = min(old.top_k, len(experts))
    return msgspec.structs.replace(
        old, experts=tuple(experts), widths=tuple(widths), hidden=max(widths), top_k=max(1, top_k)
    )


@torch.no_grad()
def _copied(mixture: Mixture, config: MixtureConfig, places: dict[int, int]) -> Mixture:
    fresh = Mixture(config, dtype=next(mixture.parameters()).dtype, device=mixture.device, autocast=mixture.autocast)
    mine = fresh.tensors()
    for name, value in mixture.tensors().items():
        moved = renumbered(name, places)
        if moved is not None and not is_gate(name):
            mine[moved].copy_(value)
    return fresh


def _place(
    mine: Mapping[str, Tensor], trunk: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]], number: int
) -> tuple[str, ...]:
    """Copy an expert's feed-forward layers in; the names of its other tensors that differ from the trunk's."""
    stray = []
    for name, value in tensors:
        if not is_trunk(name):
            mine[of_expert(name, number)].copy_(value)
        elif not torch.equal(value, trunk[name].to(value.device)):
            stray.append(name)
    return tuple(stray)


@dataclass(frozen=True)
class _Source:
    """A dense model before any of its tensors was read."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    tensors: Mapping[str, Tensor] | Mapping[str, Entry]

    @classmethod
    def of(cls, name: str, place: Place) -> _Source:
        if isinstance(place, Stage):
            if not place.whole or isinstance(place, Mixture):
                raise _bad("an expert must be a whole dense model", name, f"it is a {type(place).__name__}", "load one")
            return cls(name, place.config, None, place.tensors())
        config, entries = preflight(place)
        tokenizer = Tokenizer.load(place) if (Path(place) / TOKENIZER).exists() else None
        return cls(name, config, tokenizer, entries)

    def read(self, dtype: torch.dtype, wanted: Any = lambda name: True) -> Iterator[tuple[str, Tensor]]:
        """Its tensors one at a time, each checked; a tied copy is its owner."""
        owners = {copy: owner for owner, copy in tied_names(self.config)}
        names = list(chain.from_iterable(self.config.layer_shapes(index) for index in range(self.config.layer_count)))
        sources = {name: owners.get(name, name) for name in names if wanted(name)}
        for name, value in self._values(sources):
            value = value.detach().to(dtype)
            check_finite(name, value, self.name)
            yield name, value

    def _values(self, sources: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
        held: dict[str, Any] = dict(self.tensors)
        if all(isinstance(value, Tensor) for value in held.values()):
            return ((name, held[source]) for name, source in sources.items())
        return read_tensors(held, sources)


def _check_alike(sources: list[_Source]) -> Tokenizer | None:
    """The tokenizer of all, compared first: two that differ mostly differ in size, too, and that says less."""
    known = [(source.name, source.tokenizer) for source in sources if source.tokenizer is not None]
    for name, tokenizer in known[1:]:
        if tokenizer.digest() != known[0][1].digest():
            raise _other_tokenizer(*known[0], name, tokenizer)
    first = sources[0]
    for other in sources[1:]:
        if differences := unlike(first.config, other.config):
            why = f"{first.name} and {other.name}: {'; '.join(differences)}"
            next = "assemble experts that came from one seed; unlike ones can be served side by side and routed to"
            raise _bad("experts of unlike shapes make no mixture", other.name, why, next)
    return known[0][1] if known else None


def _other_tokenizer(name: str, one: Tokenizer, other_name: str, other: Tokenizer) -> TalkootError:
    next = "train experts with the seed's tokenizer; those with another one can be served and routed to on their own"
    return _bad(
        "experts with unlike tokenizers make no mixture", f"{name} and {other_name}", one.differences(other), next
    )


def _refuse_refresh(config: MixtureConfig) -> None:
    if config.trunk == "mean-refresh":
        why = "its trunk is the mean of all its experts, so it changes with each that comes or goes"
        next = "assemble the mixture anew and count everybody's statistics again, or use pinned or mean-frozen"
        raise _bad("this mixture cannot be changed in place", "trunk policy mean-refresh", why, next)


def _bad(what: str, where: str, why: str, next: str) -> TalkootError:
    return TalkootError(what, where=where, why=why, next=next)
