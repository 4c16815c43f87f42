"""Numbers in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

MEDIA_TYPE = "text/plain; version=0.0.4"


class Metric(NamedTuple):
    """A number, or one per set of labels.

    Attributes:
        name: without the prefix ``talkoot_``.
        kind: ``gauge`` or ``counter``.
        text: what it is.
        value: None where it is not known; a mapping has label sets, each a tuple of (label, value).
    """

    name: str
    kind: str
    text: str
    value: float | Mapping[tuple[tuple[str, str], ...], float] | None


def exposition(metrics: Iterable[Metric]) -> str:
    """The text that a scraper reads."""
    lines = []
    for name, kind, text, value in metrics:
        lines += [f"# HELP talkoot_{name} {text}", f"# TYPE talkoot_{name} {kind}"]
        for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            told = ",".join(f'{label}="{_escaped(said)}"' for label, said in labels)
            told = f"{{{told}}}" if told else ""
            lines.append(f"talkoot_{name}{told} {'NaN' if number is None else repr(number)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
