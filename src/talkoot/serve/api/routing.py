"""Who answers: the router's choice, held on to through a conversation, and who steps in where there is none."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from talkoot.core.errors import TalkootError, nearest
from talkoot.serve.api.catalogue import AUTO, ENSEMBLE, Router, Shelf
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
        scores, confidence, known: its decision.
        sticky: the decision is the conversation's earlier one.
    """

    mode: str
    candidates: tuple[Source, ...]
    version: str = ""
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
            return Route(_mode(model, shelf), (shelf.models[model],) * 2)  # lost once, it is asked again
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
            raise TalkootError(
                "there is no router",
                where=f"model {AUTO!r}",
                why="several experts are served, and nothing says which of them knows what",
                next="fit one with `talkoot blend route`, or ask for a model by its name",
            )
        return Route(_mode(name, shelf), (shelf.models[name],) * 2)

    def _ask(self, shelf: Shelf, router: Router, prompt: Prompt) -> Route:
        text = _routed(prompt, self._scope)
        if not text.strip():
            return self._stand_in(shelf, {}, [], None)
        said = router.route_text(text)
        scores = {name: float(score) for name, score in said.scores.items() if name in shelf.models}
        ranked = sorted(scores, key=lambda name: (name != said.expert, -scores[name]))
        if not said.known:
            return self._stand_in(shelf, scores, ranked, float(said.confidence))
        spare = [one for one in (shelf.general, *ranked[:1]) if one]  # at the very end the best one again
        chosen = tuple(shelf.models[name] for name in [*ranked, *spare])
        return Route("expert", chosen, shelf.version, scores, float(said.confidence), known=True)

    def _stand_in(
        self, shelf: Shelf, scores: Mapping[str, float], ranked: list[str], confidence: float | None
    ) -> Route:
        if self._unknown == "refuse":
            raise UnknownDomain(
                "no expert knows this domain",
                where="the prompt",
                why=f"the router's best guess is {ranked[0]!r}, and it is not sure" if ranked else "it is empty",
                next="ask for a model by its name",
            )
        wished = [shelf.general, ENSEMBLE] if self._unknown == "general" else [ENSEMBLE, shelf.general]
        names = [one for one in wished if one in shelf.models] + ranked
        first = (names or list(shelf.models))[0]
        chosen = tuple(shelf.models[name] for name in [*(names or [first]), first])
        return Route(_mode(first, shelf), chosen, shelf.version, scores, confidence, known=False)


def _mode(name: str, shelf: Shelf) -> str:
    if name == shelf.general:
        return "general"
    kind = shelf.models[name].kind
    return {"mixture": "moe", "ensemble": "ensemble"}.get(kind, "expert")


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
