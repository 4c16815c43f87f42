"""How flat vectors travel between replicas: each codec is a fixed layout of bytes.

The size follows from the count; :func:`talkoot.plan.mixing.message_bytes` knows it without tensors.

- ``float32``, ``bfloat16``: the numbers, rounded to nearest.
- ``int8``: blocks of 256 numbers. First one float32 scale for each block, its largest magnitude / 127; then all numbers
  as round(x / scale). No error is above half a scale (Dettmers et al., 2022, without their quantile map).
- ``sparse``: chunks of 4,096 numbers, of which the largest in magnitude travel, a share of ``mixing.density`` and at
  least one. A chunk takes 4 bytes for two magnitudes, low and high, as bfloat16; then 14 bits for each number kept, in
  ascending order: 12 of index, one of sign (1 = minus), one that says high; then zeros up to a whole byte. All others
  are zero. The two magnitudes are the means of the smaller and the larger ones, cut where the squared error is least,
  the exact 1-dimensional 2-means (Fisher, 1958); so no pair of levels would leave a smaller residual.

What arrives is a stranger's: every other length, order, padding or number than an encoder writes is refused, and so
is whatever is not finite. Numbers are little-endian, as on all machines that we know of.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from talkoot.core.registry import Registry
from talkoot.plan.mixing import BLOCK, CHUNK, LEVEL_BYTES, WORD_BITS, message_bytes
from talkoot.train.frames import to_frame
from talkoot.train.sections import Mixing
from talkoot.world.api import Blank, Frame, frame_bytes

Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """A layout of flat vectors as bytes."""

    def encode(self, vector: Tensor, knobs: Mixing) -> Frame:
        """The vector (1-D, floating point, on any device) as bytes; it must not change while they travel.

        Numbers that are not finite, or not so as float32, make a frame that every receiver refuses.
        """
        ...

    def decode(self, frame: Frame, count: int, knobs: Mixing, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A new vector of ``count`` numbers.

        Raises:
            ValueError: these bytes are not such a vector, and why.
        """
        ...


codecs: Registry[Codec] = Registry("codec")


class Plain:
    """Numbers of one type; see the module's text. float32 on the CPU travels without a copy."""

    def __init__(self, name: str) -> None:
        self._name, self._dtype = name, getattr(torch, name)

    def encode(self, vector: Tensor, knobs: Mixing) -> Frame:
        return to_frame(vector.to(self._dtype))

    def decode(self, frame: Frame, count: int, knobs: Mixing, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        data = _copied(_bytes_of(frame, message_bytes(self._name, count, knobs.density)))
        return _finite(data.view(self._dtype)).to(device, dtype)


class Blocks:
    """8-bit integers with a scale for each block; see the module's text."""

    def encode(self, vector: Tensor, knobs: Mixing) -> Frame:
        count = len(vector)
        blocks = F.pad(vector.to(torch.float32), (0, -count % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1) / 127 if count else blocks.new_zeros(0)
        # A block of zeros, or of numbers so small that its scale is zero, becomes zeros.
        levels = (blocks / scales.where(scales > 0, 1.0)[:, None]).round_().clamp_(-127, 127)
        parts = [scales, levels.to(torch.int8).view(-1)[:count]]
        return to_frame(torch.cat([part.cpu().view(torch.uint8) for part in parts]))

    def decode(self, frame: Frame, count: int, knobs: Mixing, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        data = _copied(_bytes_of(frame, message_bytes("int8", count, knobs.density)))
        scales = data[: len(data) - count].view(torch.float32)
        levels = data[len(data) - count :].view(torch.int8)
        if not bool((scales >= 0).all()):  # not a number is refused here as well
            raise ValueError("a block's scale is negative or not a number")
        if bool((levels == -128).any()):
            raise ValueError("a number is -128, below the range")
        blocks = F.pad(levels.to(torch.float32), (0, -count % BLOCK)).view(-1, BLOCK) * scales[:, None]
        return _finite(blocks.view(-1)[:count]).to(device, dtype)


class Sparse:
    """The largest numbers of each chunk in 14 bits each; see the module's text."""

    def encode(self, vector: Tensor, knobs: Mixing) -> Frame:
        vector = vector.to(torch.float32)
        whole = len(vector) // CHUNK * CHUNK
        parts = [vector[:whole].view(-1, CHUNK), vector[whole:].view(1, -1)]
        return b"".join(_pack(part, _kept(part.shape[1], knobs)).tobytes() for part in parts if part.numel())

    def decode(self, frame: Frame, count: int, knobs: Mixing, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        data = _bytes_of(frame, message_bytes("sparse", count, knobs.density))
        whole, rest = divmod(count, CHUNK)
        cut = message_bytes("sparse", whole * CHUNK, knobs.density)
        parts = [(data[:cut].reshape(whole, -1), CHUNK)] if whole else []
        parts += [(data[cut:].reshape(1, -1), rest)] if rest else []
        chunks = [_unpack(records, length, _kept(length, knobs)).view(-1) for records, length in parts]
        return (torch.cat(chunks) if chunks else torch.empty(0)).to(device, dtype)


def _kept(length: int, knobs: Mixing) -> int:
    """How many numbers of a chunk of ``length`` travel."""
    return max(1, round(knobs.density * length))


def _pack(chunks: Tensor, kept: int) -> Bytes:
    """Chunks (C, length) as records, one in each row."""
    sizes, places = chunks.abs().topk(kept, dim=1)  # descending
    minus = chunks.gather(1, places).signbit().cpu().to(torch.int64)
    sizes, places = sizes.cpu(), places.cpu()
    # With the cut after j of k numbers, the squared error is a constant - head^2 / j - tail^2 / (k - j).
    head = sizes.to(torch.float64).cumsum(1)
    total = head[:, -1:]
    number = torch.arange(1, kept + 1)
    gain = head.square() / number + (total - head).square() / (kept - number).clamp(min=1)
    cut = gain.argmax(1, keepdim=True)  # the last one counted as high
    top = head.gather(1, cut)
    high = top / (cut + 1)
    low = torch.where(cut < kept - 1, (total - top) / (kept - 1 - cut).clamp(min=1), high)
    levels = torch.cat([low, high], 1).to(torch.bfloat16).view(torch.uint8).numpy()

    is_high = (number - 1 <= cut).to(torch.int64)
    words, _ = ((places << 2) | (minus << 1) | is_high).sort(1)  # ascending by index, which is in the upper bits
    bits = words.numpy().astype(">u2").view(np.uint8).reshape(len(chunks), kept, 2)
    bits = np.unpackbits(bits, axis=2)[:, :, 16 - WORD_BITS :].reshape(len(chunks), -1)
    return np.concatenate([levels, np.packbits(bits, axis=1)], axis=1)


def _unpack(records: Bytes, length: int, kept: int) -> Tensor:
    """Records as chunks (C, length); ValueError when they are none."""
    levels = _copied(records[:, :LEVEL_BYTES]).view(torch.bfloat16).to(torch.float32)
    low, high = levels[:, :1], levels[:, 1:]
    if not bool(((low >= 0) & (low <= high) & high.isfinite()).all()):
        raise ValueError("a chunk's magnitudes are not 0 <= low <= high, and finite")
    bits = np.unpackbits(records[:, LEVEL_BYTES:], axis=1)
    if bits[:, kept * WORD_BITS :].any():
        raise ValueError("a chunk's padding is not zero")
    digits = bits[:, : kept * WORD_BITS].reshape(-1, kept, WORD_BITS)
    words = np.zeros((len(records), kept, 16), np.uint8)
    words[:, :, 16 - WORD_BITS :] = digits
    whole = torch.from_numpy(np.packbits(words, axis=2).view(">u2")[:, :, 0].astype(np.int64))
    places = whole >> 2
    if bool((places.diff(dim=1) <= 0).any()):
        raise ValueError("a chunk's indices do not ascend")
    if bool((places[:, -1] >= length).any()):
        raise ValueError(f"an index is beyond its chunk of {length} numbers")
    values = torch.where((whole & 1).bool(), high, low) * (1 - (whole & 2)).to(torch.float32)
    return torch.zeros(len(records), length).scatter_(1, places, values)


def _bytes_of(frame: Frame, expected: int) -> Bytes:
    """The frame's bytes, without a copy; ValueError when they are not as many as ``expected``."""
    if isinstance(frame, Blank):
        raise ValueError("a frame without content cannot be decoded")
    if frame_bytes(frame) != expected:
        raise ValueError(f"{frame_bytes(frame)} bytes arrived, {expected} were expected")
    return np.frombuffer(frame, dtype=np.uint8)


def _copied(data: Bytes) -> Tensor:
    copy = torch.empty(data.shape, dtype=torch.uint8)
    copy.numpy()[...] = data
    return copy


def _finite(values: Tensor) -> Tensor:
    if len(values) and not bool(torch.stack(values.aminmax()).isfinite().all()):  # both are NaN where any number is
        raise ValueError("a number is not finite")
    return values


codecs.register("float32")(Plain("float32"))
codecs.register("bfloat16")(Plain("bfloat16"))
codecs.register("int8")(Blocks())
codecs.register("sparse")(Sparse())
