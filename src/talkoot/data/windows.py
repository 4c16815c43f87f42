"""Batches addressed by ``(step, microbatch)``: window i is a pure function of the seed and of i.

There is no iterator, so there is nothing to save, restore or hand over: a peer that joins at step 9,000, a
peer that repeats a lost microbatch and an auditor who replays one all ask for an address and get its tokens.
Inside an epoch every window comes exactly once, in an order that only the seed decides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np

from talkoot.core.errors import TalkootError
from talkoot.data.permute import feistel


class Windows:
    """Training and held-out batches over one stretch of tokens.

    Window ``i`` is ``tokens[i * length : (i + 1) * length + 1]``. Neighbours share one token, the last target
    of the one and the first input of the other, so that every token is predicted once per epoch.
    The held-out part is the tail of the tokens; no training window reads a single token of it.

    Args:
        tokens: 1-D unsigned or signed integers, in memory or memory-mapped; never copied whole.
        length: context in tokens; a row has ``length + 1`` tokens (inputs and shifted targets).
        batch: rows in a batch (of one microbatch of one peer).
        seed: any integer; decides the order.
        held_out: fraction of the tokens kept for evaluation, 0 (none) to below 1.

    Raises:
        TalkootError: a size that makes no sense, or too few tokens for one training and one held-out batch.
    """

    def __init__(self, tokens: np.ndarray, *, length: int, batch: int, seed: int, held_out: float = 0.05) -> None:
        _check_sizes(length, batch, held_out)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be a 1-D integer array, not {tokens.ndim}-D {tokens.dtype}")
        self.length, self.batch, self.seed = int(length), int(batch), int(seed)
        self._tokens = tokens
        self._split = len(tokens) - int(len(tokens) * held_out)
        where = str(getattr(tokens, "filename", None) or "the tokens given")
        _check_enough(self._split, len(tokens), self.length, self.batch, held_out, where)
        #: windows in the training part, i.e. in one epoch
        self.num_windows = (self._split - 1) // self.length
        #: whole batches in the held-out part
        self.num_held_out_batches = max(0, len(tokens) - self._split - 1) // self.length // self.batch

    def window_index(self, position: int) -> int:
        """Which training window stands at a global ``position`` of the endless shuffled sequence."""
        epoch, place = divmod(position, self.num_windows)
        return feistel(place, self.num_windows, _epoch_key(self.seed, epoch))

    def train(self, step: int, microbatch: int, microbatches_per_step: int) -> np.ndarray:
        """The batch at one address.

        Row ``r`` is the window at position ``(step * microbatches_per_step + microbatch) * batch + r``, so a
        run visits every window once per epoch as long as ``microbatches_per_step`` stays the same.

        Args:
            step: optimizer step, from 0.
            microbatch: which microbatch of the step, below ``microbatches_per_step``.
            microbatches_per_step: over the whole swarm, not per peer.

        Returns:
            int64 array of shape ``(batch, length + 1)``, the caller's own copy.

        Raises:
            ValueError: an address that does not exist; it would alias another one.
        """
        if step < 0 or not 0 <= microbatch < microbatches_per_step:
            raise ValueError(f"no batch at step {step}, microbatch {microbatch} of {microbatches_per_step}")
        first = (int(step) * int(microbatches_per_step) + int(microbatch)) * self.batch
        return self._rows(self.window_index(first + row) * self.length for row in range(self.batch))

    def held_out(self, index: int) -> np.ndarray:
        """Held-out batch ``index``, below ``num_held_out_batches``, in text order, the same for every seed.

        Returns:
            int64 array of shape ``(batch, length + 1)``, the caller's own copy.

        Raises:
            ValueError: there is no such batch.
        """
        if not 0 <= index < self.num_held_out_batches:
            raise ValueError(f"no held-out batch {index}: there are {self.num_held_out_batches}")
        first = int(index) * self.batch
        return self._rows(self._split + (first + row) * self.length for row in range(self.batch))

    def _rows(self, starts: Iterable[int]) -> np.ndarray:
        out = np.empty((self.batch, self.length + 1), np.int64)
        for row, start in enumerate(starts):
            out[row] = self._tokens[start : start + self.length + 1]
        return out


def _epoch_key(seed: int, epoch: int) -> int:
    digest = hashlib.blake2b(f"talkoot/data/windows/1|{seed}|{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _check_sizes(length: int, batch: int, held_out: float) -> None:
    for name, value, allowed, good in (
        ("length", length, "a whole number, 1 or more", length == int(length) and length >= 1),
        ("batch", batch, "a whole number, 1 or more", batch == int(batch) and batch >= 1),
        ("held_out", held_out, "a fraction from 0 to below 1", 0 <= held_out < 1),
    ):
        if not good:
            raise TalkootError(
                f"{name} = {value} is not possible",
                where=f"the data setting {name!r}",
                why=f"{name} must be {allowed}",
                next=f"set {name} to {allowed}",
            )


def _check_enough(split: int, total: int, length: int, batch: int, held_out: float, where: str) -> None:
    need = batch * length + 1
    parts = [("training", split, 1 - held_out)]
    if held_out > 0:
        parts.append(("held-out", total - split, held_out))
    short = [(name, found, share) for name, found, share in parts if found < need]
    if not short:
        return
    name, found, _ = short[-1]
    wanted = max(math.ceil(need / share) for _, _, share in parts) + 1  # +1 absorbs the split's rounding
    least = min(found for _, found, _ in parts)
    advice = [f"give at least {wanted:,} tokens of text"]
    if least - 1 >= batch:
        advice.append(f"shorten the context to {(least - 1) // batch}")
    if least - 1 >= length:
        advice.append(f"lower the batch to {(least - 1) // length}")
    if held_out > 0 and total >= 2 * need:
        advice.append(f"set held_out to {math.ceil(need / total * 1000) / 1000}")
    if held_out > 0 and total >= need:
        advice.append("set held_out to 0 and go without evaluation")
    raise TalkootError(
        f"too little text: {total:,} tokens found, {wanted:,} needed",
        where=where,
        why=f"a {name} batch of {batch} x {length} takes {need:,} tokens, and the {name} part has {found:,}",
        next="; or ".join(advice),
    )
