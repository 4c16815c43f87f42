"""What clients may send, in OpenAI's words, and how they are told that it was wrong.

What would change the answer and is not offered is refused, never ignored; what only describes the client is ignored.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from talkoot.serve.api.service import Job

MAX_BODY_BYTES = 1 << 20
MAX_CHOICES = 8
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Heat = Annotated[float, msgspec.Meta(ge=0, le=2)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Stops = Stop | Annotated[list[Stop], msgspec.Meta(max_length=4)] | None


class BadRequest(Exception):
    """The body is not what it should be: a sentence, and the key that it is about."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.text, self.param = text, param


class TextPart(msgspec.Struct):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct):
    """One turn."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    content: str | list[TextPart] | None = None


class StreamOptions(msgspec.Struct):
    """How to stream."""

    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    max_tokens: Count | None = None
    temperature: Heat | None = None
    top_p: Share | None = None
    n: Choices | None = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    user: str | None = None
    # Not offered: anything but the value that changes nothing is refused.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def common(self) -> dict[str, Any]:
        """What both kinds of request say, for a :class:`Job`."""
        for key in ("frequency_penalty", "presence_penalty", "logit_bias"):
            _refuse(bool(getattr(self, key)), key, "is not offered")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        top_p = 1.0 if self.top_p is None else self.top_p
        return {
            "choices": self.n or 1,
            "temperature": (1.0 if self.temperature is None else self.temperature) if top_p > 0 else 0.0,
            "top_p": top_p if top_p > 0 else 1.0,  # nothing but the likeliest token
            "seed": int.from_bytes(os.urandom(4)) if self.seed is None else self.seed,
            "stops": stops,
            "streamed": bool(self.stream),
        }

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the count of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Common, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=1000)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def job(self) -> Job:
        """What is wanted."""
        _refuse(bool(self.tools), "tools", "is not offered")
        _refuse(bool(self.functions), "functions", "is not offered")
        _refuse(bool(self.top_logprobs), "top_logprobs", "is not offered above 0")
        plain = self.response_format is None or self.response_format.get("type") == "text"
        _refuse(not plain, "response_format", "is not offered but as {'type': 'text'}")
        messages = [{"role": one.role, "content": _text(one.content)} for one in self.messages]
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return Job(messages, max_tokens=limit, logprobs=bool(self.logprobs), **self.common())


class CompletionRequest(_Common, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str] = ""
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def job(self) -> Job:
        """What is wanted."""
        _refuse(bool(self.echo), "echo", "is not offered")
        _refuse(bool(self.suffix), "suffix", "is not offered")
        _refuse((self.best_of or 1) > (self.n or 1), "best_of", "is not offered above n")
        _refuse((self.logprobs or 0) > 1, "logprobs", "is not offered above 1: only the chosen token's is told")
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        _refuse(len(prompts) != 1, "prompt", "must be one text: send several as several requests")
        limit = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return Job(prompts[0], max_tokens=limit, logprobs=self.logprobs is not None, **self.common())


class AddExpert(msgspec.Struct, forbid_unknown_fields=True):
    """``POST /v1/experts``: an expert's name, and on the server's machine its model's folder and its statistics."""

    name: str
    model: str
    statistics: str = ""


T = TypeVar("T")


def parse(body: bytes, kind: type[T]) -> T:
    """A request's body.

    Raises:
        BadRequest: naming the key.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        text = str(problem)
        found = re.search(r"`\$\.([A-Za-z_]+)", text) or re.search(r"required field `(\w+)`", text)
        param = found[1] if found else None
        raise BadRequest(f"{param or 'the body'}: {text}", param) from problem


def _refuse(wrong: bool, key: str, why: str) -> None:
    if wrong:
        raise BadRequest(f"{key} {why}", key)


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
