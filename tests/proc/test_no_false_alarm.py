"""Under load nobody is taken for lost who is not: eight peers train while the processors are busy with other things.

It takes its time, so it runs only where TALKOOT_SOAK_S says how many seconds; the claim is made for 300.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from processes import execute, tiny, write_text

from talkoot.core.fold import Entry
from talkoot.train.recipe import Swarm

SECONDS = float(os.environ.get("TALKOOT_SOAK_S", "0"))


@contextmanager
def busy_processors() -> Iterator[None]:
    """Two endless loops per processor."""
    count = 2 * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.skipif(not SECONDS, reason="set TALKOOT_SOAK_S to the seconds that it may take")
@pytest.mark.timeout(SECONDS + 120)
def test_nobody_is_lost_although_the_processors_are_oversubscribed(tmp_path):
    recipe = tiny(write_text(tmp_path), steps=10**6, depth=4, swarm=Swarm(stages=4, replicas=2), checkpoint_every=200)
    until: list[float] = []

    def observe(lead: Any, entry: Entry) -> None:
        if entry.receipt.op == "train.commit":
            until.append(time.monotonic() + SECONDS)  # from the first one on
            lead.stop_requested = time.monotonic() > until[0]

    with busy_processors():
        ran = execute(recipe, tmp_path / "run", observe=observe)
    waits = [receipt.ended for receipt in ran.receipts("train.commit")]
    longest_s = max(after - before for before, after in pairwise(waits))
    print(f"{ran.result.step} steps, longest {longest_s:.1f} s, {len(ran.receipts('peer.lost'))} lost")
    assert ran.receipts("peer.lost") == []
    assert ran.receipts("run.warning") == []
    assert ran.result.step > SECONDS / 10
