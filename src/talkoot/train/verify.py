"""What a run's log proves about it, from the receipts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import msgspec

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import Entry, State, advance
from talkoot.core.log import Log
from talkoot.run.records import Gone, Resume, Start
from talkoot.train.mixing import mixing_rules
from talkoot.train.records import Committed, Seated, Worked
from talkoot.train.rounds.audit import Audit


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a verification.

    Attributes:
        receipts: how many there are; every signature and the hash chain were checked on the way.
        steps: committed steps that stand after all rollbacks.
        faults: each violation of "every microbatch (or every replica's round) in exactly one commit", in words; empty =
            it holds.
        lost: names of the peers that were lost, in order.
        replaced: names that were lost and later held a seat again.
        final: the folded state.
    """

    receipts: int
    steps: int
    faults: tuple[str, ...]
    lost: tuple[str, ...]
    replaced: tuple[str, ...]
    final: State


def verify(path: Path) -> Findings:
    """Check a run's log.

    Raises:
        TalkootError: the log is missing, or a signature, the chain or the order of receipts does not hold.
    """
    log = Log(path, readonly=True)
    try:
        return examine(log.entries())
    except ValueError as problem:
        raise TalkootError(
            "the run log does not verify",
            where=str(path),
            why=str(problem),
            next="do not trust this run: its lead signed what no honest lead writes",
            code=Exit.FAILED_CHECK,
        ) from problem
    finally:
        log.close()


def examine(entries: Iterable[Entry]) -> Findings:
    """Check entries whose signatures and chain hold; ValueError when they cannot follow each other."""
    state, faults, lost, replaced = State(), [], [], []
    worked: dict[str, tuple[int, Worked]] = {}  # receipts not yet cited by a commit, by id
    standing: dict[int, int] = {}  # committed steps, by the first one of each commit
    stages, audit = 0, None
    for entry in entries:
        state = advance(state, entry)
        receipt = entry.receipt
        faults += audit.see(entry) if audit is not None else ()
        match receipt.op:
            case "run.start":
                start = receipt.read(Start)
                stages, audit = len(start.stages), Audit(start.recipe) if _in_rounds(start) else None
            case "run.resume":
                stages = len(receipt.read(Resume).stages) or stages  # another cut may hold from here on
            case "train.step":
                worked[entry.id] = (receipt.step, receipt.read(Worked))
            case "train.commit":
                facts = receipt.read(Committed)
                if audit is None:
                    cited = [worked.pop(parent) for parent in receipt.parents if parent in worked]
                    if len(cited) != len(receipt.parents):
                        faults.append(f"step {receipt.step} cites receipts that are unknown or already counted")
                    faults += _count(receipt.step, facts, cited, stages)
                if receipt.step in standing:
                    faults.append(f"step {receipt.step} was committed twice")
                standing[receipt.step] = facts.steps
            case "train.rollback":
                standing = {step: steps for step, steps in standing.items() if step < receipt.step}
            case "peer.lost":
                lost.append(receipt.read(Gone).name)
            case "peer.seat":
                name = receipt.read(Seated).name
                if name in lost and name not in replaced:
                    replaced.append(name)
    if list(standing) != list(accumulate(standing.values(), initial=0))[:-1]:
        faults.append("the committed steps have gaps")
    return Findings(
        receipts=state.position,
        steps=sum(standing.values()),
        faults=tuple(faults),
        lost=tuple(lost),
        replaced=tuple(replaced),
        final=state,
    )


def _in_rounds(start: Start) -> bool:
    rule = start.recipe.get("mixing", {}).get("rule", "ddp")
    return rule in mixing_rules and mixing_rules[rule].local is True


def _count(step: int, facts: Committed, cited: list[tuple[int, Worked]], stages: int) -> list[str]:
    """Violations of: in each stage, the cited receipts cover each microbatch that was to visit it exactly once."""
    faults = [f"step {step} cites work of step {other}" for other, _ in cited if other != step]
    faults += [f"step {step} cites work of stage {w.stage}" for _, w in cited if not 0 <= w.stage < stages]
    if facts.stages and not _sound(facts, stages):
        return [*faults, f"step {step} states paths that no plan has"]
    for stage in range(stages):
        every = [m for m in range(len(facts.losses)) if not facts.stages or stage in facts.stages[m]]
        seen = Counter(m for _, work in cited if work.stage == stage for m in work.microbatches)
        wrong = sorted(m for m in {*seen, *every} if seen[m] != 1 or m not in every)
        if wrong:
            faults.append(f"step {step}, stage {stage}: microbatches {wrong} were not counted exactly once")
    return faults


def _sound(facts: Committed, stages: int) -> bool:
    """Whether the stated stages are paths of a ring, one for each microbatch, that together visit every stage."""
    paths = facts.stages
    single = all(path[:1] == (0,) and len(set(path)) == len(path) and set(path) <= set(range(stages)) for path in paths)
    return (
        single and len(paths) == len(facts.losses) and {stage for path in paths for stage in path} == {*range(stages)}
    )
