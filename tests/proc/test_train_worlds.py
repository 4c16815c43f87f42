"""The same job in both worlds: identical losses, identical state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from processes import Ran, execute, tiny, write_text

from talkoot.run.folder import LOG
from talkoot.train.recipe import Swarm
from talkoot.train.records import Committed, Worked
from talkoot.train.verify import verify


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (3, 1)])
def test_simulated_and_real_runs_give_the_same_losses_and_state(stages, replicas, tokenizer, tmp_path):
    recipe = tiny(write_text(tmp_path), steps=4, tokenizer=tokenizer, swarm=Swarm(stages=stages, replicas=replicas))
    real, simulated = execute(recipe, tmp_path / "real"), execute(recipe, tmp_path / "sim", sim=True)
    assert real.losses == simulated.losses
    assert list(real.losses) == [0, 1, 2, 3]
    assert real.result.state_hash == simulated.result.state_hash != ""
    assert real.result.held_out == simulated.result.held_out
    assert verify(tmp_path / "real" / LOG).final["run"].world == "real"
    assert verify(tmp_path / "sim" / LOG).final["run"].world == "simulated"


def work_by_name(ran: Ran) -> Counter[str]:
    """How many (step, stage, microbatch) paths each peer served, by the commits' own account."""
    paths = [path for receipt in ran.receipts("train.commit") for path in receipt.read(Committed).paths]
    return Counter(name for path in paths for name in path)


def test_a_slow_peer_gets_fewer_microbatches_and_the_result_is_the_same(tmp_path: Path):
    text = write_text(tmp_path)
    unequal = Swarm(stages=2, replicas=2, speeds=(1.0, 0.25, 1.0, 0.25))
    slowed = execute(tiny(text, steps=3, microbatches=8, swarm=unequal), tmp_path / "slowed")
    even = execute(tiny(text, steps=3, microbatches=8), tmp_path / "even", sim=True)
    assert work_by_name(slowed) == {"alder": 18, "birch": 6, "cedar": 18, "dogwood": 6}  # 8 in proportion 4 : 1
    assert work_by_name(even) == {"alder": 12, "birch": 12, "cedar": 12, "dogwood": 12}
    claimed = Counter()
    for receipt in slowed.receipts("train.step"):
        claimed[receipt.peer] += len(receipt.read(Worked).microbatches)
    assert sorted(claimed.values()) == [6, 6, 18, 18]
    assert slowed.losses == even.losses
    assert slowed.result.state_hash == even.result.state_hash
