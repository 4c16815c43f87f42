"""Answers in OpenAI's words: whole, in chunks, and as errors; with what talkoot adds about who spoke."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from talkoot.serve.api.models import Token
from talkoot.serve.api.routing import Route
from talkoot.serve.api.service import Part, Switch


def error(text: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error's body."""
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


class Reply:
    """One request's answer, in the making.

    Args:
        chat: a chat completion, not a text completion.
        model: as the client called it.
        route: who was to answer.
        logprobs: the client asked for them.
    """

    def __init__(self, *, chat: bool, model: str, route: Route, logprobs: bool) -> None:
        self._chat, self._model, self._route, self._logprobs = chat, model, route, logprobs
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{os.urandom(12).hex()}"
        self._created = int(time.time())
        self._texts: dict[int, str] = {}
        self._tokens: dict[int, list[tuple[str, Token]]] = {}
        self._finish: dict[int, str] = {}
        self._said: dict[int, int] = {}
        self._prompt_tokens = 0
        self._switches: list[Switch] = []
        self.expert, self.switches = "", self._switches
        self.first_at = 0.0  # monotonic seconds, of the first text

    def take(self, part: Part) -> None:
        """Something came."""
        choice = part.choice
        if part.switch is not None:
            self._switches.append(part.switch)
            if part.switch.kept == "nothing":
                self._texts[choice], self._tokens[choice] = "", []
        if choice == 0 or not self.expert:
            self.expert, self._prompt_tokens = part.source.name, part.prompt_tokens
        self._said[choice] = part.said
        if (part.text or part.finish) and not self.first_at:
            self.first_at = time.monotonic()
        self._texts[choice] = self._texts.get(choice, "") + part.text
        self._tokens.setdefault(choice, []).extend(part.tokens)
        if part.finish:
            self._finish[choice] = part.finish

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompt, and of all answers together."""
        said = sum(self._said.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": said,
            "total_tokens": self._prompt_tokens + said,
        }

    @property
    def talkoot(self) -> dict[str, Any]:
        """Who spoke, and why."""
        route = self._route
        told: dict[str, Any] = {
            "expert": self.expert,
            "mode": route.mode,
            "routed_to": route.expert or None,
            "router": route.version or None,
            "scores": dict(route.scores),
            "confidence": route.confidence,
            "known": route.known,
            "sticky": route.sticky,
        }
        if self._switches:
            told["switched"] = [
                {"from": one.lost, "to": one.to, "after_tokens": one.after, "went_on_from": one.kept}
                for one in self._switches
            ]
        return told

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        body = self._head("chat.completion" if self._chat else "text_completion")
        choices = []
        for choice, text in sorted(self._texts.items()):
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            logprobs = self._told(self._tokens[choice]) if self._logprobs else None
            choices.append({"index": choice, **said, "logprobs": logprobs, "finish_reason": self._finish.get(choice)})
        return body | {"choices": choices, "usage": self.usage, "talkoot": self.talkoot}

    def chunk(self, part: Part) -> dict[str, Any]:
        """One part of a stream; talkoot's own words go with an answer's first and last part, and with a switch."""
        first = not part.text and not part.finish
        if self._chat:
            said: dict[str, Any] = {"role": "assistant", "content": ""} if first else {"content": part.text}
            content: dict[str, Any] = {"delta": said}
        else:
            content = {"text": part.text}
        logprobs = self._told(part.tokens) if self._logprobs and part.tokens else None
        choice = {"index": part.choice, **content, "logprobs": logprobs, "finish_reason": part.finish or None}
        body = self._head("chat.completion.chunk" if self._chat else "text_completion") | {"choices": [choice]}
        return body | ({"talkoot": self.talkoot} if first or part.finish else {})

    def counted(self) -> dict[str, Any]:
        """The chunk with the usage, after all others."""
        return self._head("chat.completion.chunk" if self._chat else "text_completion") | {
            "choices": [],
            "usage": self.usage,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _told(self, tokens: list[tuple[str, Token]]) -> Mapping[str, Any]:
        if self._chat:
            return {
                "content": [
                    {"token": text, "logprob": one.logprob, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, one in tokens
                ]
            }
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [one.logprob for _, one in tokens],
            "top_logprobs": None,
            "text_offset": None,
        }
