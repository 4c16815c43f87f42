"""Who is who in a simulation."""

from __future__ import annotations

from talkoot.core.keys import Key


def simulated_key(seed: int, name: str, incarnation: int = 1) -> Key:
    """The key of a simulated peer in its first, second, ... life; everybody can work it out."""
    return Key.derived(seed, name, incarnation)
