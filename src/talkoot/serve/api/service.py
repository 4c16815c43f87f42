"""Answering: the route's first candidate speaks; when it is lost, the next one goes on where it stopped.

What a client has seen is never taken back. A stream goes on from the tokens that were sent, where the tokenizers are
equal, and else from their text; an answer that nobody has seen yet begins again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from talkoot.core.errors import Exit, TalkootError
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.engine import Gone
from talkoot.serve.api.models import Ask, Source, Token
from talkoot.serve.api.pool import Pool
from talkoot.serve.api.routing import Route
from talkoot.serve.api.voices import Prompt, Voice, Voices
from talkoot.serve.api.writer import Writer


class Unfit(TalkootError):
    """The prompt cannot be put to the model."""


class TooLong(Unfit):
    """It leaves the model no room for an answer."""


class Busy(TalkootError):
    """So many requests wait already that another one is turned away."""


class Unavailable(TalkootError):
    """None of those who could answer is there."""


@dataclass(frozen=True)
class Job:
    """What a client wants.

    Attributes:
        prompt: a text or a conversation.
        choices: independent answers.
        max_tokens: per answer; None for all that the model has room for, up to :data:`DEFAULT_TOKENS`.
        stops: texts before which an answer ends.
        logprobs: tokens are told with their texts and log-probabilities.
        streamed: parts are seen as they come.
    """

    prompt: Prompt
    choices: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    streamed: bool = False


class Switch(NamedTuple):
    """An answer changed hands: from whom, to whom, after how many tokens, and what it went on from (``tokens``,
    ``text``, or ``nothing``: it began again)."""

    lost: str
    to: str
    after: int
    kept: str


@dataclass
class Part:
    """What is new in one answer.

    Attributes:
        choice: which answer.
        source: who speaks.
        text: to show; may be empty.
        tokens: with their texts, since the last part, where asked for.
        finish: ``stop`` or ``length`` in an answer's last part.
        prompt_tokens, said: tokens of the prompt and of the answer so far, each in its speaker's.
        switch: set when another one took over: with ``kept == "nothing"`` all earlier parts of this answer are void.
    """

    choice: int
    source: Source
    text: str = ""
    tokens: list[tuple[str, Token]] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int = 0
    said: int = 0
    switch: Switch | None = None


DEFAULT_TOKENS = 512


class Gate:
    """Lets so many requests in at a time; so many more wait for their turn, in order.

    Args:
        running, waiting: how many.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self._running, self._waiting = asyncio.Semaphore(running), waiting
        self.queued = 0

    async def __aenter__(self) -> None:
        if self._running.locked() and self.queued >= self._waiting:
            raise Busy(
                "the server is busy",
                where="the queue",
                why=f"{self.queued} requests wait already",
                next="try again in a moment",
                code=Exit.UNREACHABLE,
            )
        self.queued += 1
        try:
            await self._running.acquire()
        finally:
            self.queued -= 1

    async def __aexit__(self, *_: object) -> None:
        self._running.release()


class Service:
    """See the module's text.

    Args:
        pool: of models.
        voices: of the same.
        gate: how many requests at a time.
        clock: seconds.
    """

    def __init__(self, pool: Pool, voices: Voices, gate: Gate, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool, self.voices, self.gate, self._clock = pool, voices, gate, clock

    async def answer(self, job: Job, route: Route) -> AsyncGenerator[Part]:
        """All parts of all answers, as they come.

        Raises:
            Busy: too many requests wait.
            Unfit: the prompt cannot be put to the first candidate.
            Unavailable: no candidate is there.
        """
        async with self.gate:
            if job.choices == 1:
                async with aclosing(self._one(job, route, 0)) as parts:
                    async for part in parts:
                        yield part
                return
            heard: asyncio.Queue[Part | None] = asyncio.Queue()
            tasks = [asyncio.ensure_future(self._into(heard, job, route, choice)) for choice in range(job.choices)]
            try:
                for _ in tasks:
                    while (part := await heard.get()) is not None:
                        yield part
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _into(self, heard: asyncio.Queue[Part | None], job: Job, route: Route, choice: int) -> None:
        try:
            async with aclosing(self._one(job, route, choice)) as parts:
                async for part in parts:
                    heard.put_nowait(part)
        finally:
            heard.put_nowait(None)

    async def _one(self, job: Job, route: Route, choice: int) -> AsyncGenerator[Part]:
        speech = _Speech(job, choice, route.expert)
        problems: list[Gone | TalkootError] = []
        for source in self._in_order(route):
            try:
                async with aclosing(self._speak(speech, source)) as parts:
                    async for part in parts:
                        yield part
                return
            except (Gone, TalkootError) as problem:
                # A prompt that does not fit is the client's to change; another model would be no answer to it.
                if isinstance(problem, Unfit) and not problems:
                    raise
                problems.append(problem)
                speech.lost = source.name
        raise Unavailable(
            "no model is there to answer",
            where=", ".join(dict.fromkeys(source.name for source in route.candidates)),
            why="; ".join(dict.fromkeys(map(_short, problems))) or "none was named",
            next="try again in a moment; GET /health says more",
            code=Exit.UNREACHABLE,
        )

    def _in_order(self, route: Route) -> list[Source]:
        """Candidates that did not fail lately first."""
        first = [source for source in route.candidates if self.pool.healthy(source)]
        return first + [source for source in route.candidates if source not in first]

    async def _speak(self, speech: _Speech, source: Source) -> AsyncGenerator[Part]:
        voice = await self.voices.of(source)
        prompt = await self._read(voice, speech.job.prompt)
        async with self.pool.use(source) as (slot, backend):
            ask, first = speech.begin(voice, source, prompt)
            yield first
            if ask is None:
                yield speech.end(source, "length")
                return
            before: float | None = None
            async with aclosing(backend.answer(ask)) as tokens:
                async for token in tokens:
                    now = self._clock()
                    slot.spoke(None if before is None else now - before)
                    before = now
                    part = speech.hear(source, token)
                    if part.text or part.finish:
                        yield part
                    if part.finish:
                        return
            raise Gone("it ended in the middle of an answer")

    async def _read(self, voice: Voice, prompt: Prompt) -> list[int]:
        """The prompt's tokens; a long one takes a while, and others must not wait for it."""
        try:
            return await self.voices.aside(lambda: voice.ids(prompt))
        except TalkootError as problem:
            raise Unfit(problem.what, where=problem.where, why=problem.why, next=problem.next) from problem


def _short(problem: Gone | TalkootError) -> str:
    return f"{problem.what}: {problem.why}" if isinstance(problem, TalkootError) else str(problem)


class _Speech:
    """One answer in the making, whoever speaks.

    Args:
        job: what is wanted.
        choice: which answer of it.
        expert: the router's choice.
    """

    def __init__(self, job: Job, choice: int, expert: str) -> None:
        self.job, self.choice, self.lost, self._expert = job, choice, "", expert
        self._said = self._prompt_tokens = 0
        self._writer: Writer | None = None
        self._digest = ""
        self._tokenizer: Tokenizer | None = None
        self._untold: list[Token] = []

    def begin(self, voice: Voice, source: Source, prompt: list[int]) -> tuple[Ask | None, Part]:
        """Somebody begins, or takes over: what to ask, or None when as many tokens as wished are there already.

        Raises:
            TooLong: this model has no room.
        """
        kept: list[int] = []
        went_on = ""
        if self._writer is not None and self.job.streamed and self._said:
            went_on = "tokens" if self._digest == voice.digest else "text"
            kept = self._writer.pass_on(voice.tokenizer, same=went_on == "tokens")
        room = source.positions - len(prompt) - len(kept) if source.positions else DEFAULT_TOKENS
        if room < 1:
            raise TooLong(
                "the prompt is too long for the model",
                where=source.name,
                why=f"it has {len(prompt) + len(kept)} tokens; with the answer it may have {source.positions}",
                next="shorten it, or ask a model with a longer context",
            )
        switch = Switch(self.lost, source.name, self._said, went_on or "nothing") if self.lost else None
        if not went_on:
            self._writer, self._said, self._untold = Writer(voice.tokenizer, self.job.stops), 0, []
        self._digest, self._tokenizer, self._prompt_tokens = voice.digest, voice.tokenizer, len(prompt)
        wished = DEFAULT_TOKENS if self.job.max_tokens is None else self.job.max_tokens
        left = min(wished - self._said, room)
        ask = Ask(
            tokens=(*prompt, *kept),
            max_tokens=left,
            ends=voice.ends,
            temperature=self.job.temperature,
            top_p=self.job.top_p,
            # One number for all three: an answer that goes on elsewhere must not repeat the draws that it has had.
            expert=self._expert,
            seed=((self.job.seed << 24) + (self.choice << 20) + self._said) % 2**63,
        )
        return ask if left > 0 else None, self._part(source, switch=switch)

    def hear(self, source: Source, token: Token) -> Part:
        """The next token."""
        if self._writer is None:
            raise ValueError("nobody has begun to speak")
        self._said += 1
        text = ""
        if token.last != "stop":  # an end token is no text
            self._untold.append(token)
            text = self._writer.push(token.id)
        if token.last or self._writer.stopped:
            return self.end(source, token.last, text)
        return self._part(source, text)

    def end(self, source: Source, finish: str, text: str = "") -> Part:
        """The last part."""
        if self._writer is not None and not self._writer.stopped:
            text += self._writer.end()
        stopped = self._writer is not None and self._writer.stopped
        return self._part(source, text, "stop" if stopped else finish)

    def _part(self, source: Source, text: str = "", finish: str = "", switch: Switch | None = None) -> Part:
        tokens: list[tuple[str, Token]] = []
        if self._tokenizer is not None and (text or finish):
            if self.job.logprobs:
                tokens = [(self._tokenizer.decode([one.id], special=True), one) for one in self._untold]
            self._untold = []
        return Part(self.choice, source, text, tokens, finish, self._prompt_tokens, self._said, switch)
