"""What ``talkoot tune`` does without a recipe: two unlike small policies learn to add from each other's attempts."""

from __future__ import annotations

from typing import Any


def unlike() -> dict[str, Any]:
    """As a recipe's content: 0.24 and 0.11 million parameters, warmed up with flawed demonstrations of their own."""
    return {
        "name": "unlike",
        "task": "addition:2",
        "model": {"layers": 2, "heads": 4},
        "optimizer": {"learning_rate": 2e-4},
        "correction": {"rule": "ftis", "gamma": 6.0},
        "peers": [
            {"name": "alder", "model": {"width": 96, "seed": 1}, "warm": {"steps": 400, "habits": {"forgotten": 0.85}}},
            {"name": "birch", "model": {"width": 64, "seed": 2}, "warm": {"steps": 600}},
        ],
    }
