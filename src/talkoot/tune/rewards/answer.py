"""Where in a completion the answer stands."""

from __future__ import annotations

MAX_ANSWER = 1000  # characters
_OPEN, _CLOSE = "<answer>", "</answer>"


def answer_in(completion: str, limit: int = MAX_ANSWER) -> str:
    """The text in the last ``<answer>`` tag; without one, the last line that is not empty; stripped.

    What is longer than ``limit`` characters is no answer: empty.
    """
    head, tag, _ = completion.rpartition(_CLOSE)
    if tag and _OPEN in head:
        found = head.rpartition(_OPEN)[2].strip()
    else:
        found = completion.rstrip().rpartition("\n")[2].strip()
    return found if len(found) <= limit else ""
