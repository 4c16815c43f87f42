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
    """

    key: str

    @property
    def step(self) -> int:
        """How far the run is."""
        ...

    @property
    def steps(self) -> int | None:
        """Of how many; None where that is not known."""
        ...

    @property
    def tokens(self) -> int:
        """That were trained on or generated."""
        ...

    @property
    def ended(self) -> bool:
        """There is nothing to run: what is shown is complete at any time."""
        ...

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
