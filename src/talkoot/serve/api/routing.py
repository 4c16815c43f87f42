"""Who answers: the router's choice, held on to through a conversation, and who steps in where there is none."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from talkoot.core.errors import TalkootError, nearest
from talkoot.serve.api.catalogue import AUTO, ENSEMBLE, Decision, Router, Shelf
from talkoot.serve.api.models import Source
from talkoot.serve.api.voices import Prompt

UNKNOWN = ("general", "ensemble", "refuse")  # what may happen to a prompt that no expert knows
SCOPES = ("turn", "chat")  # what is routed by: the last thing the user said, or all that was said
MAX_CONVERSATIONS = 10_000
MAX_ROUTED = 20_000  # characters that are looked at: the router's verdict is long clear by then


class NoSuchModel(TalkootError):
    """Nothing of that name is served."""


class UnknownDomain(TalkootError):
    """No expert knows the prompt's domain, and such prompts are to be refused."""


@dataclass(frozen=True)
class Route:
    """Who is to answer.

    Attributes:
        mode: ``expert`` (named by the client, or by the router), ``general``, ``ensemble`` or ``moe``.
        candidates: whom to ask, in this order.
        version: of the router that was asked; empty where none was.
        expert, scores, confidence, known: its decision.
        sticky: the decision is the conversation's earlier one.
    """

    mode: str
    candidates: tuple[Source, ...]
    version: str = ""
    expert: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    confidence: float | None = None
    known: bool | None = None
    sticky: bool = False


class Dispatcher:
    """Finds routes.

    Args:
        unknown: one of :data:`UNKNOWN`.
        scope: one of :data:`SCOPES`.
    """

    def __init__(self, unknown: str = "general", scope: str = "turn") -> None:
        self._unknown, self._scope = unknown, scope
        self._held: OrderedDict[str, Route] = OrderedDict()

    def route(self, shelf: Shelf, model: str, prompt: Prompt, user: str = "") -> Route:
        """A route on this shelf.

        Args:
            model: as the client called it.
            prompt: a text, or a conversation.
            user: keeps apart conversations that begin alike.

        Raises:
            NoSuchModel: nothing is called so.
            UnknownDomain: see there.
        """
        if model != AUTO or not shelf.models:
            if model not in shelf.models:
                raise _no_such(model, shelf)
            twice = (shelf.models[model],) * 2  # lost once, it is asked again
            if twice[0].kind == "prompt-mixture" and shelf.router is not None:
                return self._within(shelf, shelf.router, twice, prompt)
            return Route(_mode(model, shelf), twice)
        if shelf.router is None:
            return self._without_router(shelf)
        key = _conversation(prompt, user)
        held = self._held.get(key) if key and _turns(prompt) > 1 else None
        served = set(shelf.models.values())
        if held is not None and held.candidates[0] in served:
            self._held.move_to_end(key)
            return replace(held, candidates=tuple(one for one in held.candidates if one in served), sticky=True)
        route = self._ask(shelf, shelf.router, prompt)
        if key and route.known:
            self._held[key] = route
            while len(self._held) > MAX_CONVERSATIONS:
                self._held.popitem(last=False)
        return route

    def _without_router(self, shelf: Shelf) -> Route:
        """One model is one choice; of several, the general one, or all together."""
        names = [shelf.general, ENSEMBLE, *(shelf.models if len(shelf.models) == 1 else ())]
        name = next((one for one in names if one in shelf.models), None)
        if name is None:
            raise NoSuchModel(
                f"the model {AUTO!r} is not served: there is no router",
                where="model",
                why="several experts are served, and nothing says which of them knows what",
                next="fit one with `talkoot blend route`, or ask for a model by its name",
            )
        return Route(_mode(name, shelf), (shelf.models[name],) * 2)

    def _within(self, shelf: Shelf, router: Router, candidates: tuple[Source, ...], prompt: Prompt) -> Route:
        """Which expert of a mixture."""
        said = router.route_text(_routed(prompt, self._scope))
        return _decided("moe", candidates, shelf, said)

    def _ask(self, shelf: Shelf, router: Router, prompt: Prompt) -> Route:
        said = router.route_text(_routed(prompt, self._scope))
        scores = {name: score for name, score in said.scores.items() if name in shelf.models}
        ranked = sorted(scores, key=lambda name: (name != said.expert, -scores[name]))
        if said.known and ranked:
            names = [*ranked, shelf.general, ranked[0]]  # at the very end the best one again
            return _decided("expert", _sources(names, shelf), shelf, said)
        if self._unknown == "refuse":
            raise UnknownDomain(
                "no expert knows this domain",
                where="the prompt",
                why=f"the router's best guess is {said.expert!r}, and it is not sure",
                next="ask for a model by its name",
            )
        wished = [shelf.general, ENSEMBLE] if self._unknown == "general" else [ENSEMBLE, shelf.general]
        names = [one for one in [*wished, *ranked] if one in shelf.models]
        return _decided(_mode(names[0], shelf), _sources([*names, names[0]], shelf), shelf, said)


def _sources(names: Iterable[str], shelf: Shelf) -> tuple[Source, ...]:
    return tuple(shelf.models[name] for name in names if name in shelf.models)


def _decided(mode: str, candidates: tuple[Source, ...], shelf: Shelf, said: Decision) -> Route:
    return Route(
        mode,
        candidates,
        shelf.version,
        said.expert,
        {name: float(score) for name, score in said.scores.items()},
        float(said.confidence),
        bool(said.known),
    )


def _mode(name: str, shelf: Shelf) -> str:
    if name == shelf.general:
        return "general"
    kind = shelf.models[name].kind
    return {"mixture": "moe", "prompt-mixture": "moe", "ensemble": "ensemble"}.get(kind, "expert")


def _routed(prompt: Prompt, scope: str) -> str:
    """The text to route by; of a long one the end, where the question is."""
    if isinstance(prompt, str):
        return prompt[-MAX_ROUTED:]
    said = [one["content"] for one in prompt if scope == "chat" or one["role"] == "user"] or [
        one["content"] for one in prompt
    ]
    return ("\n\n".join(said) if scope == "chat" else said[-1])[-MAX_ROUTED:]


def _turns(prompt: Prompt) -> int:
    return 1 if isinstance(prompt, str) else sum(one["role"] == "user" for one in prompt)


def _conversation(prompt: Prompt, user: str) -> str:
    """What all turns of one conversation share: who asks, and how it began."""
    if isinstance(prompt, str):
        return ""
    first = next((place for place, one in enumerate(prompt) if one["role"] == "user"), len(prompt))
    began = [[one["role"], one["content"]] for one in prompt[: first + 1]]
    return hashlib.blake2b(json.dumps([user, began]).encode("utf-8", "replace"), digest_size=16).hexdigest()


def _no_such(model: str, shelf: Shelf) -> NoSuchModel:
    return NoSuchModel(
        f"the model {model!r} is not served",
        where="model",
        why=nearest(model, shelf.names) if shelf.models else "the blend has no expert yet",
        next="see GET /v1/models",
    )
