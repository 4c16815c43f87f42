"""What is on offer: a blend's folder, read again whenever it changes, also from outside.

A :class:`Shelf` never changes. Requests under way keep the one that they began with, with its router; the next
request sees the next shelf.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from talkoot.blend.folder import MANIFEST, MIXTURE, ROUTER, Blend, Expert, check_name
from talkoot.core.errors import TalkootError
from talkoot.model.hf_config import CONFIG
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.models import FLOAT_BYTES, Source, describe

AUTO, MOE, ENSEMBLE, GENERAL = "auto", "moe", "ensemble", "general"


class Decision(Protocol):
    """What a router says of a prompt."""

    expert: str
    scores: Mapping[str, float]
    confidence: float
    known: bool


class Router(Protocol):
    """What is needed of ``talkoot.blend.router.Router``."""

    @property
    def names(self) -> Sequence[str]:
        """Of the experts that it knows."""
        ...

    @property
    def version(self) -> str:
        """Changes with what it decides."""
        ...

    def route_text(self, text: str) -> Decision:
        """Whose prompt this is."""
        ...

    def adding(self, name: str, statistics: Any) -> Router:
        """One that knows another expert, too, or other statistics of one."""
        ...

    def without(self, name: str) -> Router:
        """One that never knew this expert; TalkootError where too few would be left to choose from."""
        ...

    def save(self, path: Path) -> None:
        """Write it down."""
        ...


@dataclass(frozen=True)
class Shelf:
    """What is served, as of one moment.

    Attributes:
        models: by the name that clients use; ``auto`` is none of them.
        experts: names of those that a router may choose.
        router: of prompts; None where nobody fitted one, or nobody is left to choose from.
        general: the model's name for text that no expert knows; empty for none.
        problems: what cannot be served, and why.
    """

    models: Mapping[str, Source]
    experts: tuple[str, ...]
    router: Router | None = None
    general: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Of the router; empty without one."""
        return "" if self.router is None else str(self.router.version)

    @property
    def names(self) -> list[str]:
        """Everything that can be asked for."""
        automatic = self.router is not None or len(self.models) == 1 or self.general or ENSEMBLE in self.models
        return [*([AUTO] if automatic and self.models else []), *self.models]


def _router(path: Path) -> Router:
    import torch

    from talkoot.blend.router import Router as Stored

    torch.set_num_threads(1)  # a prompt is routed in less time than threads take to wake up
    return cast(Any, Stored.load(path))


def _statistics(path: Path, router: Any) -> Any:
    from talkoot.blend.statistics import Statistics

    return Statistics.read(path, features=router.features.id)


class Catalogue:
    """A folder's offer.

    Args:
        folder: of a blend, or of a single model.
        load_router, load_statistics: read such files; statistics must be what this router counts.

    Raises:
        TalkootError: it is neither.
    """

    def __init__(
        self,
        folder: Path,
        load_router: Callable[[Path], Router] = _router,
        load_statistics: Callable[[Path, Any], Any] = _statistics,
    ) -> None:
        self.folder, self._load_router, self._load_statistics = folder, load_router, load_statistics
        self.single = not (folder / MANIFEST).exists() and (folder / CONFIG).exists()
        self._reading = threading.Lock()
        self.problem = ""  # why the newest state of the folder is not what is served
        self._stamp = self._look()
        self.shelf = self._read()

    @property
    def stale(self) -> bool:
        """Whether the folder changed since it was read."""
        return self._look() != self._stamp

    def refresh(self) -> bool:
        """Look whether the folder changed; True when there is a new shelf. A broken one leaves the old one."""
        with self._reading:  # or an older state, read more slowly, would replace a newer one
            if (stamp := self._look()) == self._stamp:
                return False
            self._stamp = stamp
            try:
                self.shelf = self._read()
            except TalkootError as problem:
                self.problem = str(problem)
                return False
            self.problem = ""
            return True

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, (self.folder / MANIFEST, self.folder / ROUTER, self.folder / MIXTURE / CONFIG)))

    def _read(self) -> Shelf:
        if self.single:
            name = re.sub(r"[^a-z0-9._-]+", "-", self.folder.resolve().name.lower()).strip("-.") or "model"
            return Shelf({name: describe(name, self.folder)}, (name,))
        blend, problems = Blend.open(self.folder), dict[str, str]()
        offered = [(one.name, [blend.path(one.model)]) for one in blend]
        if blend.manifest.general:
            offered.append((GENERAL, [blend.path(blend.manifest.general)]))
        if (self.folder / MIXTURE / CONFIG).exists():
            offered.append((MOE, [self.folder / MIXTURE]))
        if len(alike := _alike(blend)) > 1:
            offered.append((ENSEMBLE, [blend.model_folder(name) for name in alike]))
        models: dict[str, Source] = {}
        for name, folders in offered:
            if name in models:  # an expert that is called so comes first
                continue
            try:
                models[name] = describe(name, *folders)
            except (TalkootError, OSError) as problem:
                problems[name] = str(problem)
        experts = tuple(name for name in blend.names if name in models)
        router = self._router(blend, experts, problems)
        return Shelf(models, experts, router, GENERAL if GENERAL in models else "", problems)

    def _router(self, blend: Blend, experts: Sequence[str], problems: dict[str, str]) -> Router | None:
        """The stored one, of exactly these experts: with those that have statistics, without those that went."""
        path = self.folder / ROUTER
        if not path.exists():
            return None
        router = self._load_router(path)
        for name in experts:
            file = blend.statistics_file(name)
            if name not in router.names and file is not None:
                try:
                    router = router.adding(name, self._load_statistics(file, router))
                except TalkootError as problem:  # it is served under its name all the same
                    problems[name] = str(problem)
        for name in [one for one in router.names if one not in experts]:
            try:
                router = router.without(name)
            except TalkootError:  # nothing is left to choose between
                return None
        return router

    def add(self, name: str, model: str, statistics: str = "") -> Shelf:
        """Put an expert into the blend, or another one under its name.

        Args:
            name: of the expert.
            model, statistics: its folder and its domain's statistics, absolute or relative to the blend's folder.
                Without statistics it is served under its name, and what the router knows of that name stays.

        Raises:
            TalkootError: nothing was changed.
        """
        blend = self._blend()
        check_name(name)
        folder = blend.path(model)
        source = describe(name, folder)
        expert = Expert(
            name=name,
            model=model,
            parameters=source.weights // FLOAT_BYTES,
            tokenizer=Tokenizer.load(folder).digest(),
            statistics=statistics,
        )
        path = self.folder / ROUTER
        if statistics and path.exists():
            router = self._load_router(path)
            router = router.adding(name, self._load_statistics(blend.path(statistics), router))
            router.save(path)  # before the manifest: a router that knows more than there is does no harm
        blend.put(expert)
        self.refresh()
        return self.shelf

    def remove(self, name: str) -> Shelf:
        """Strike an expert off; its files stay.

        Raises:
            TalkootError: there is none.
        """
        self._blend().remove(name)
        self.refresh()
        if self.shelf.router is not None:
            self.shelf.router.save(self.folder / ROUTER)
            self.refresh()
        return self.shelf

    def _blend(self) -> Blend:
        if self.single:
            raise TalkootError(
                "a single model is served, not a blend",
                where=str(self.folder),
                why=f"the folder has no {MANIFEST}",
                next="make a blend with `talkoot blend add`, and serve its folder",
            )
        return Blend.open(self.folder)


def _alike(blend: Blend) -> list[str]:
    """The experts that share a tokenizer with most others: only they can speak together."""
    ((digest, _),) = Counter(one.tokenizer for one in blend).most_common(1) or [("", 0)]
    return [one.name for one in blend if one.tokenizer == digest]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
