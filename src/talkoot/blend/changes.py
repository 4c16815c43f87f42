"""An expert comes or goes: the manifest and the router change together, whether a server runs or not.

Whoever reads a blend between two steps of a change sees a whole one: a router may know experts that the manifest does
not (they are left out), and the manifest may name experts that the router does not know (their statistics are added).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

from talkoot.blend.folder import ROUTER, Blend, Expert, check_name
from talkoot.core.errors import TalkootError
from talkoot.model.folder import read_headers
from talkoot.model.tokenizer import Tokenizer


class Decision(Protocol):
    """What a router says of a prompt."""

    expert: str
    scores: Mapping[str, float]
    confidence: float
    known: bool


class AnyRouter(Protocol):
    """What is needed of :class:`talkoot.blend.router.Router` where experts come and go."""

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

    def adding(self, name: str, statistics: Any) -> AnyRouter:
        """One that knows another expert, too, or other statistics of one."""
        ...

    def without(self, name: str) -> AnyRouter:
        """One that never knew this expert; TalkootError where too few would be left to choose from."""
        ...

    def save(self, path: Path) -> None:
        """Write it down, whole or not at all."""
        ...


def load_router(path: Path) -> AnyRouter:
    """The stored router."""
    import torch

    from talkoot.blend.router import Router

    torch.set_num_threads(1)  # a prompt is routed in less time than threads take to wake up
    return cast(Any, Router.load(path))


def load_statistics(path: Path, router: Any) -> Any:
    """A domain's statistics; refused before a number is read unless they are what this router counts."""
    from talkoot.blend.statistics import Statistics

    return Statistics.read(path, features=router.features.id)


class Changes:
    """Changes of one blend.

    Args:
        blend: an open one.
        routers, statistics: read such files.
    """

    def __init__(
        self,
        blend: Blend,
        routers: Callable[[Path], AnyRouter] = load_router,
        statistics: Callable[[Path, Any], Any] = load_statistics,
    ) -> None:
        self._blend, self._routers, self._statistics = blend, routers, statistics
        self._path = blend.folder / ROUTER

    def router(self, experts: Sequence[str]) -> tuple[AnyRouter | None, dict[str, str]]:
        """The stored router, of exactly these experts; None where there is none, or nothing to choose between.

        Also told is which experts it cannot know, and why.
        """
        problems: dict[str, str] = {}
        if not self._path.exists():
            return None, problems
        router = self._routers(self._path)
        for name in experts:
            file = self._blend.statistics_file(name)
            if name not in router.names and file is not None:
                try:
                    router = router.adding(name, self._statistics(file, router))
                except TalkootError as problem:
                    problems[name] = str(problem)
        for name in [one for one in router.names if one not in experts]:
            try:
                router = router.without(name)
            except TalkootError:
                return None, problems
        return router, problems

    def add(self, name: str, model: str, statistics: str = "", source: str = "") -> Expert:
        """Put an expert into the blend, or another one under its name.

        Args:
            name: of the expert.
            model, statistics: its folder and its domain's statistics, absolute or relative to the blend's folder.
                Without statistics no prompt is routed to it, unless the router knows its name already.
            source: the text it learned, as its owner calls it.

        Raises:
            TalkootError: nothing was changed.
        """
        check_name(name)
        folder = self._blend.path(model)
        expert = Expert(
            name=name,
            model=model,
            parameters=sum(prod(entry.shape) for entry in read_headers(folder).values()),
            tokenizer=Tokenizer.load(folder).digest(),
            statistics=statistics,
            source=source,
        )
        if statistics and self._path.exists():
            router = self._routers(self._path)
            router.adding(name, self._statistics(self._blend.path(statistics), router)).save(self._path)
        self._blend.put(expert)
        return expert

    def remove(self, name: str) -> Expert:
        """Strike an expert off; its files stay.

        Raises:
            TalkootError: there is none.
        """
        gone = self._blend.remove(name)
        router, _ = self.router(self._blend.names)
        if router is not None:
            router.save(self._path)
        return gone
