"""A peer's whole training state as bytes: weights, optimizer, counters. Safetensors, so nothing in it can run."""

from __future__ import annotations

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as write_safetensors
from torch import Tensor

from talkoot.core.errors import TalkootError

POLICY, LEARNER = "policy.", "learner."


class Counters(msgspec.Struct, frozen=True):
    """What is no tensor: rounds done, updates seen, and whose they are. (Two peers' states are never one blob: it would
    be dropped with the one's and be missing for the other.)"""

    round: int
    version: int
    peer: str = ""


def to_bytes(policy: dict[str, Tensor], learner: dict[str, Tensor], counters: Counters) -> bytes:
    """One blob of everything; the same state gives the same bytes."""
    tensors = {POLICY + name: value for name, value in policy.items()}
    tensors |= {LEARNER + name: value for name, value in learner.items()}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in sorted(tensors.items())}
    return write_safetensors(tensors, {"counters": msgspec.json.encode(counters).decode()})


def from_bytes(data: bytes, where: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Counters]:
    """What :func:`to_bytes` stored.

    Raises:
        TalkootError: these are no such bytes.
    """
    try:
        tensors = read_safetensors(data)
        size = int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        meta = msgspec.json.decode(header.get("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        counters = msgspec.json.decode(meta.get("counters", "").encode(), type=Counters)
    except (SafetensorError, msgspec.DecodeError, ValueError) as problem:
        raise TalkootError(
            "a stored state cannot be read",
            where=where,
            why=str(problem),
            next="run the same command again: an older state is used, or start anew with --out",
        ) from problem
    policy = {name.removeprefix(POLICY): value for name, value in tensors.items() if name.startswith(POLICY)}
    learner = {name.removeprefix(LEARNER): value for name, value in tensors.items() if name.startswith(LEARNER)}
    return policy, learner, counters
