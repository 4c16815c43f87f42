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

from talkoot.blend.folder import MANIFEST, MIXTURE, ROUTER, Blend
from talkoot.core.errors import TalkootError
from talkoot.model.hf_config import CONFIG
from talkoot.serve.api.models import Source, describe

AUTO, MOE, ENSEMBLE, GENERAL = "auto", "moe", "ensemble", "general"


class Decision(Protocol):
    """What a router says of a prompt."""

    expert: str
    scores: Mapping[str, float]
    confidence: float
    known: bool


class Router(Protocol):
    """What is needed of :class:`talkoot.blend.router.Router`."""

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
        """One that knows another expert, too."""
        ...

    def without(self, name: str) -> Router:
        """One that never knew this expert; TalkootError where too few would be left to choose from."""
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


def load_router(path: Path) -> Router:
    """The stored router."""
    import torch

    from talkoot.blend.router import Router as Stored

    torch.set_num_threads(1)  # a prompt is routed in less time than threads take to wake up
    return cast(Any, Stored.load(path))


class Catalogue:
    """A folder's offer.

    Args:
        folder: of a blend, or of a single model.
        load: reads the router's file.

    Raises:
        TalkootError: it is neither.
    """

    def __init__(self, folder: Path, load: Callable[[Path], Router] = load_router) -> None:
        self.folder, self._load = folder, load
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
        """The stored one, of exactly these experts, whatever its file and the manifest say: a change is two writes, and
        this may come between them."""
        path = self.folder / ROUTER
        if not path.exists():
            return None
        router: Any = self._load(path)
        for name in experts:
            file = blend.statistics_file(name)
            if name not in router.names and file is not None:
                from talkoot.blend.statistics import Statistics

                try:
                    router = router.adding(name, Statistics.read(file, features=router.features.id))
                except TalkootError as problem:  # it is served under its name all the same
                    problems[name] = str(problem)
        for name in [one for one in router.names if one not in experts]:
            try:
                router = router.without(name)
            except TalkootError:
                return None  # nothing is left to choose between
        return router

    def add(self, name: str, model: str, statistics: str = "") -> Shelf:
        """Put an expert into the blend, or another one under its name.

        Args:
            name: of the expert.
            model, statistics: its folder and its domain's statistics, absolute or relative to the blend's folder.

        Raises:
            TalkootError: nothing was changed.
        """
        blend = self._blend()
        from talkoot.blend.changes import add_expert

        add_expert(self.folder, name, blend.path(model), statistics=blend.path(statistics) if statistics else None)
        self.refresh()
        return self.shelf

    def remove(self, name: str) -> Shelf:
        """Strike an expert off; its files stay.

        Raises:
            TalkootError: there is none.
        """
        self._blend()
        from talkoot.blend.changes import remove_expert

        remove_expert(self.folder, name)
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
