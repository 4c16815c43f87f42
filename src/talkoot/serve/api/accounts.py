"""What the server counts, for ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from talkoot.serve.api.catalogue import Shelf
from talkoot.serve.api.pool import Pool
from talkoot.serve.exposition import Metric, exposition


class Accounts:
    """Counters of requests; the rest is asked of those who know."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by endpoint, model or expert, status
        self.prompt_tokens = self.completion_tokens = self.switches = 0
        self.seconds = self.first_seconds = 0.0
        self.answered = 0

    def answer(self, usage: dict[str, int], switches: int, first_s: float, seconds: float) -> None:
        """An answer ended, so long after it was asked for; its first part came after ``first_s``."""
        self.answered += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.switches += switches
        self.first_seconds += first_s
        self.seconds += seconds

    def text(self, shelf: Shelf, pool: Pool, queued: int) -> str:
        """Everything in Prometheus' text format."""
        requests = {
            (("endpoint", endpoint), ("model", model), ("status", str(status))): count
            for (endpoint, model, status), count in sorted(self.requests.items())
        }
        rows = [
            Metric("requests_total", "counter", "Requests answered, by endpoint, model and status.", requests),
            Metric("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            Metric("completion_tokens_total", "counter", "Tokens of answers.", self.completion_tokens),
            Metric("answers_total", "counter", "Answers that were completed.", self.answered),
            Metric("answer_seconds_total", "counter", "From request to the end of its answer.", self.seconds),
            Metric(
                "first_token_seconds_total", "counter", "From request to its answer's first part.", self.first_seconds
            ),
            Metric(
                "switches_total", "counter", "Answers that changed hands because an expert was lost.", self.switches
            ),
            Metric("requests_waiting", "gauge", "Requests that wait for their turn.", queued),
            Metric("router", "gauge", "The router in use.", {(("version", shelf.version or "none"),): 1}),
            *_per_expert(pool),
        ]
        return exposition(rows)


def _per_expert(pool: Pool) -> Iterable[Metric]:
    slots = {slot.source.name: slot for slot in pool.slots}  # of two of one name, the newer
    told = [(((("expert", name),)), slot) for name, slot in sorted(slots.items())]
    words = {
        "loads": "Times a model was loaded.",
        "evictions": "Times a model was unloaded for another.",
        "failures": "Times a model was lost or could not be loaded.",
        "tokens": "Tokens that a model gave.",
    }
    for key, text in words.items():
        yield Metric(f"expert_{key}_total", "counter", text, {labels: slot.counts[key] for labels, slot in told})
    yield Metric("expert_bytes", "gauge", "Memory held by a model.", {labels: slot.held for labels, slot in told})
    yield Metric("expert_users", "gauge", "Answers that a model gives.", {labels: slot.users for labels, slot in told})
    seconds = {labels: slot.token_s for labels, slot in told}
    yield Metric("expert_token_seconds", "gauge", "Seconds per token, smoothed.", seconds)
