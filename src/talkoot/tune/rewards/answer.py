"""Where in a completion the answer stands."""

from __future__ import annotations

MAX_ANSWER = 1000  # characters; what is longer is no answer
_OPEN, _CLOSE = "<answer>", "</answer>"


def answer_in(completion: str) -> str:
    """The text in the last ``<answer>`` tag; without one, the last line that is not empty; stripped."""
    head, tag, _ = completion.rpartition(_CLOSE)
    if tag and _OPEN in head:
        found = head.rpartition(_OPEN)[2].strip()
    else:
        found = completion.rstrip().rpartition("\n")[2].strip()
    return found if len(found) <= MAX_ANSWER else ""
