"""Completions on their way: 8 bytes per token beside a signed account, and back, believing nothing.

The account is a receipt (``tune.generate``); it names the digests of the frames, so the signature covers every token
and log-probability. A receiver takes the sender's word for what *it* drew and for nothing else: the prompt, the answer
and the reward it works out by itself.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from talkoot.core.ids import PeerId, RunId, digest
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.tune.completion import Completion, Group, PromptRef
from talkoot.tune.records import Generated
from talkoot.world.api import Frame, World

A = TypeVar("A", "array[int]", "array[float]")

BYTES_PER_TOKEN = 8
FRAME_KINDS = ("ids", "logp", "texts")
MAX_TEXT_BYTES_PER_TOKEN = 64  # a token of a large vocabulary may spell a long word


class Refused(ValueError):
    """A record or completion that is not used; ``reason`` is a few words that are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Limits(NamedTuple):
    """What a record may hold at most: groups, completions per group, tokens per completion."""

    groups: int
    samples: int
    tokens: int


class Record(NamedTuple):
    """A record that was checked: whose, its receipt's id, the account, and the completions; texts where they came."""

    peer: PeerId
    id: str
    facts: Generated
    groups: list[Group]
    texts: list[list[str]] | None


def pack(
    world: World, step: int, facts: Generated, groups: Sequence[Group], texts: Sequence[str] | None, started: float
) -> tuple[Signed, list[bytes]]:
    """Sign a round's completions.

    Args:
        texts: of all completions in order, for peers with another tokenizer; None = nobody needs them.
        started: world time in seconds when generating began.
    """
    ids, logp = array("i"), array("f")
    for group in groups:
        for completion in group.completions:
            ids.extend(completion.ids)
            logp.extend(completion.logp)
    frames = [_little(ids), _little(logp)]
    if texts is not None:
        frames.append(b"".join(text.replace("\0", " ").encode("utf-8", "replace") + b"\0" for text in texts))
    receipt = Receipt(
        run=world.run,
        generation=0,
        step=step,
        peer=world.me,
        task=Task(op="tune.generate", inputs={"task": facts.task, "policy": facts.policy}, seed=facts.seed),
        outputs={kind: digest(frame, "frame") for kind, frame in zip(FRAME_KINDS, frames, strict=False)},
        body=body(facts),
        cost=facts.busy_s,
        started=started,
        ended=world.now(),
    )
    return sign(receipt, world.key), frames


def unpack(signed: Signed, frames: Sequence[Frame], sender: PeerId, run: RunId, limits: Limits) -> Record:
    """Check a record's signature, form and frames.

    Raises:
        Refused: it is not acceptable.
    """
    try:
        receipt = signed.open()
        facts = receipt.read(Generated)
    except ValueError as problem:
        raise Refused("bad signature or form", str(problem)) from problem
    if (receipt.peer, receipt.run, receipt.op) != (sender, run, "tune.generate") or receipt.step != facts.round:
        raise Refused("of another peer or run", f"{receipt.op} of {receipt.peer[:8]} in {receipt.run}")
    counts = _shape(facts, limits)
    blobs = [bytes(frame) if isinstance(frame, bytes | bytearray | memoryview) else b"" for frame in frames]
    if len(blobs) not in (2, 3) or len(blobs[0]) != 4 * sum(counts) or len(blobs[1]) != 4 * sum(counts):
        raise Refused("length mismatch", f"{[len(blob) for blob in blobs]} bytes for {sum(counts)} tokens")
    for kind, blob in zip(FRAME_KINDS, blobs, strict=False):
        if receipt.outputs.get(kind) != digest(blob, "frame"):
            raise Refused("altered on the way", f"the {kind} are not those that were signed")
    ids = _from_little(array("i"), blobs[0])
    logp = _from_little(array("f"), blobs[1])
    texts = _texts(blobs[2], counts) if len(blobs) == 3 else None
    return _record(sender, signed.id, facts, ids, logp, texts)


def _shape(facts: Generated, limits: Limits) -> list[int]:
    """Every completion's length, in order."""
    parts = len(facts.prompts), len(facts.samples), len(facts.lengths), len(facts.stopped)
    if len(set(parts)) != 1:
        raise Refused("length mismatch", f"{parts} prompts, samples, lengths, ends")
    if not 1 <= parts[0] <= limits.groups:
        raise Refused("too long", f"{parts[0]} groups where 1 to {limits.groups} are allowed")
    if len(set(facts.prompts)) != parts[0]:
        raise Refused("duplicate", "a prompt comes twice")
    for samples, lengths, stopped in zip(facts.samples, facts.lengths, facts.stopped, strict=True):
        if not len(samples) == len(lengths) == len(stopped) or not 1 <= len(samples) <= limits.samples:
            raise Refused("length mismatch", f"{len(samples)} samples, {len(lengths)} lengths, {len(stopped)} ends")
        if len(set(samples)) != len(samples):
            raise Refused("duplicate", "a sample comes twice")
        if min(lengths) < 1 or max(lengths) > limits.tokens:
            raise Refused("too long", f"{max(lengths)} tokens where 1 to {limits.tokens} are allowed")
    return [length for lengths in facts.lengths for length in lengths]


def _record(
    sender: PeerId, name: str, facts: Generated, ids: array[int], logp: array[float], texts: list[str] | None
) -> Record:
    groups: list[Group] = []
    split: list[list[str]] = []
    at = number = 0
    for index, samples, lengths, stopped in zip(
        facts.prompts, facts.samples, facts.lengths, facts.stopped, strict=True
    ):
        completions: list[Completion] = []
        for length, stop in zip(lengths, stopped, strict=True):
            part = slice(at, at + length)
            completions.append(Completion(tuple(ids[part]), tuple(logp[part]), "stop" if stop else "length"))
            at += length
        groups.append(Group(PromptRef(facts.task, index), samples, tuple(completions)))
        split.append((texts or [])[number : number + len(lengths)])
        number += len(lengths)
    return Record(sender, name, facts, groups, None if texts is None else split)


def _texts(blob: bytes, counts: Sequence[int]) -> list[str]:
    if len(blob) > MAX_TEXT_BYTES_PER_TOKEN * sum(counts) + len(counts):
        raise Refused("too long", f"{len(blob)} bytes of text for {sum(counts)} tokens")
    parts = blob.split(b"\0")
    if len(parts) != len(counts) + 1 or parts[-1]:
        raise Refused("length mismatch", f"{len(parts) - 1} texts for {len(counts)} completions")
    try:
        return [part.decode() for part in parts[:-1]]
    except UnicodeDecodeError as problem:
        raise Refused("bad signature or form", str(problem)) from problem


def _little(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _from_little(values: A, blob: bytes) -> A:
    values.frombytes(blob)
    if sys.byteorder == "big":
        values.byteswap()
    return values
