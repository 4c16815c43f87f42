"""What a run without commits says of itself: post-training, and the training of experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from talkoot.core.receipt import Receipt
from talkoot.serve.events import Told


class Work(NamedTuple):
    """A peer's account of a stretch of work: seconds of computing, bytes that it sent."""

    busy_s: float
    sent_bytes: int = 0


class Part(Protocol):
    """Follows the receipts of its kind of run, and says what is shown of them; bounded, however long the run is.

    Attributes:
        key: under which the view holds it, and pages find its cards.
        step, steps: how far the run is, of how many; ``steps`` is None where that is not known.
        tokens: that were trained on or generated.
        ended: there is nothing to run; what is shown is complete at any time.
    """

    key: str

    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def ended(self) -> bool: ...

    def take(self, receipt: Receipt) -> Iterable[Told]:
        """One more receipt; what is worth telling of it.

        Raises:
            ValueError: it cannot be read, or cannot follow the others.
        """
        ...

    def work(self, receipt: Receipt) -> Work | None:
        """What a peer did, where the receipt is an account of work."""
        ...

    def now(self) -> float | None:
        """How late it is by the peers' clocks, as far as they agree; world time. None = nobody says."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        ...
