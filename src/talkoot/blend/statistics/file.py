"""Statistics as a file: safetensors with a signed header; read with suspicion, header before numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from talkoot.blend.statistics.objects import Statistics
from talkoot.blend.statistics.provenance import Outline
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId, digest, short
from talkoot.core.keys import Key, verify

VERSION = 1
MAX_BYTES = 1 << 32
_MAX_HEADER = 1 << 20
_PURPOSE = "statistics"


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the signature covers.

    Attributes:
        version: of this format.
        outline: what is there.
        signer: who vouches for all of this; for statistics of one source, its contributor.
    """

    version: int
    outline: Outline
    signer: PeerId


def signed(statistics: Statistics, key: Key) -> bytes:
    """A file's content, signed.

    Raises:
        ValueError: they are not fit to be sent, or are of one source that is not the key's.
    """
    statistics.check()
    sources = statistics.provenance.sources
    if len(sources) == 1 and sources[0].contributor != key.peer:
        raise ValueError("statistics of one source are signed by the peer that counted them")
    header = Header(version=VERSION, outline=statistics.outline(), signer=key.peer)
    text = msgspec.json.encode(header)
    signature = key.sign(bytes.fromhex(digest(text, _PURPOSE))).hex()
    return save(statistics.numbers(), {"statistics": text.decode(), "signature": signature})


def read_header(path: Path) -> Header:
    """What a file says about itself, its signature checked; no number is read.

    Raises:
        TalkootError: there is no such file, it is no statistics, or the signature does not fit.
    """
    with opened(path) as file:
        return _header(file, path)


def read(path: Path, *, features: str = "") -> Statistics:
    """Read, and believe nothing that can be checked.

    Args:
        features: what they must be of; others are refused before any number is read. Empty = whatever they are.

    Raises:
        TalkootError: unreadable, too large, unsigned, of other features, or numbers that cannot be.
    """
    with opened(path) as file:
        header = _header(file, path)
        found = header.outline.provenance.features
        if features and found != features:
            why = f"they are of {short(found)}, wanted are {short(features)}"
            next = "count the text anew with the same tokenizer, embeddings and sizes"
            raise _refused("the statistics are of other features", path, why, next)
        try:
            check_sizes(file, header.outline.tensors())
        except ValueError as problem:
            raise _refused("the statistics cannot be read", path, str(problem)) from None
        tensors = {name: file.get_tensor(name) for name in header.outline.tensors()}
    try:
        return Statistics.rebuilt(header.outline, tensors)
    except ValueError as problem:
        raise _refused(
            "the statistics cannot be true", path, str(problem), "do not trust whoever signed them"
        ) from None


@contextmanager
def opened(path: Path, what: str = "the statistics") -> Iterator[Any]:
    """A safetensors file whose header is intact; the library's own complaints, renamed."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _refused(f"{what} cannot be read", path, f"it has more than {MAX_BYTES:,} bytes")
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise _refused(f"{what} cannot be read", path, why, "check the path") from None
    except SafetensorError as problem:
        raise _refused(f"{what} cannot be read", path, str(problem)) from None


def _header(file: Any, path: Path) -> Header:
    metadata = file.metadata() or {}
    text, signature = metadata.get("statistics", "").encode(), metadata.get("signature", "")
    if not text or len(text) > _MAX_HEADER:
        raise _refused("the file holds no statistics", path, "its header does not say so")
    try:
        header = msgspec.json.decode(text, type=Header)
        signed = verify(header.signer, bytes.fromhex(signature), bytes.fromhex(digest(text, _PURPOSE)))
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise _refused("the file holds no statistics", path, f"its header is broken: {problem}") from None
    if header.version != VERSION:
        why = f"they are of version {header.version}, this talkoot reads {VERSION}"
        raise _refused("the statistics cannot be read", path, why, "use the talkoot that wrote them")
    if not signed:
        raise _refused("the statistics are not signed", path, f"the signature is not {short(header.signer)}'s")
    sources = header.outline.provenance.sources
    if len(sources) == 1 and sources[0].contributor != header.signer:
        why = f"counted by {short(sources[0].contributor)}, signed by {short(header.signer)}"
        raise _refused("the statistics are signed by somebody else", path, why)
    return header


def check_sizes(file: Any, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compare what an open file's header declares with what is wanted; nothing else is read or allocated.

    Raises:
        ValueError: they differ.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in file.keys():  # noqa: SIM118 (no mapping)
        part = file.get_slice(name)
        found[name] = part.get_dtype(), tuple(part.get_shape())
    if found != dict(wanted):
        raise ValueError("the numbers' sizes are not those that the header says")


def _refused(what: str, path: Path, why: str, next: str = "fetch or count them again") -> TalkootError:
    return TalkootError(what, where=str(path), why=why, next=next)
