"""What each loss would cost: the rung of the ladder that serves, and the seconds until training is where it was.

The same decisions as the running lead's (:mod:`talkoot.train.recovery`), from what is known beforehand: each stage that
lost somebody gets its state from the first rung of the recipe's ladder that can serve. A loss costs

    detection + process start + transfer + computing again + half the iteration that was under way,

where transfers go on side by side, and computing again is: nothing (``shadow``), half a period of one stage's or of all
stages' iterations (``replay``, ``checkpoint``), or as many iterations as an approximation sets training back
(``blend``: the jump of the loss over its slope).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from talkoot.core.ids import PeerId
from talkoot.plan.keepers import choose_keepers, head_start_s
from talkoot.plan.steps import Seat, View
from talkoot.world.links import Network

VALUE_BYTES = 4  # of a weight and of each moment
STATE_VALUES = 3  # per parameter: the weight and two moments
JUMP_ITERATIONS = 5.0  # that a blend sets training back; `talkoot bench recovery` measures it, and it varies widely


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A swarm and its recovery.

    Attributes:
        holders: names of the peers of each stage; the first of them streams to the keepers.
        values: parameters of each stage; ``blocks``: decoder blocks of each; ``ends``: stages with embedding or head.
        ring: whether the first and the last stage are neighbours.
        network: the links between peers, and from the lead, by name.
        ladder, copies, guarded, refresh_every, moments: as in a recipe's section ``recovery``.
        stream_bytes: of a gradient's value on its way to a keeper.
        checkpoint_every: iterations between snapshots; where there are none, those of the whole run.
        iteration_s: of the whole swarm; ``stage_s``: that each stage computes in one.
        sent_bytes: what crosses a border between two stages in an iteration, one way, in so many ``microbatches``.
        detection_s, start_s: until a loss is known, and until a new process can load a state.
        jump_iterations: that a blend sets training back.
    """

    holders: tuple[tuple[str, ...], ...]
    values: tuple[int, ...]
    blocks: tuple[int, ...]
    ends: tuple[int, ...] = (0,)
    ring: bool = True
    network: Network = Network()
    ladder: tuple[str, ...] = ("replica", "checkpoint")
    copies: int = 1
    guarded: tuple[int, ...] = ()
    refresh_every: int = 50
    moments: str = "neighbours"
    stream_bytes: int = 4
    checkpoint_every: int = 100
    iteration_s: float = 1.0
    stage_s: tuple[float, ...] = ()
    sent_bytes: float = 0.0
    microbatches: int = 1
    detection_s: float = 0.0
    start_s: float = 0.0
    jump_iterations: float = JUMP_ITERATIONS

    @property
    def num_stages(self) -> int:
        """The pipeline's length."""
        return len(self.holders)

    def state_bytes(self, stage: int) -> float:
        """Weights and both moments."""
        return VALUE_BYTES * STATE_VALUES * self.values[stage]

    def transfer_s(self, source: str, target: str, size: float) -> float:
        """Seconds of ``size`` bytes between two peers."""
        link = self.network.link(source, target)
        return link.latency_s + size / link.bytes_per_s

    def beside(self, stage: int) -> list[int]:
        """The stages before and after one."""
        count = self.num_stages
        found = [(stage - 1) % count, (stage + 1) % count] if self.ring else [stage - 1, stage + 1]
        return sorted({other for other in found if 0 <= other < count and other != stage})


class Price(msgspec.Struct, frozen=True):
    """What one rung asks for one stage: seconds of transfer, and of computing again."""

    transfer_s: float
    again_s: float = 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a loss.

    Attributes:
        lost: names of the peers; ``stages``: those that nobody holds any more.
        rungs: by stage that lost somebody, the rung that serves; empty when for some stage none does.
        exact: whether the state is bit for bit the lost one.
        seconds: until training is where it would have been, on average; infinite when no rung serves.
        why: what the rungs said, where none serves.
    """

    lost: tuple[str, ...]
    stages: tuple[int, ...]
    rungs: dict[int, str]
    exact: bool
    seconds: float
    why: str = ""


def keepers(case: Case) -> dict[int, tuple[str, ...]]:
    """Who keeps each guarded stage, as the running lead chooses them (:mod:`talkoot.plan.keepers`)."""
    if not {"shadow", "journal"} & set(case.ladder):
        return {}
    found: dict[int, tuple[str, ...]] = dict.fromkeys(case.guarded or range(case.num_stages), ())
    sizes = [float(case.stream_bytes * values) for values in case.values]
    for stage, peer in choose_keepers(_view(case), dict.fromkeys(found, case.copies), [], sizes):
        found[stage] = (*found[stage], str(peer))
    return found


def _view(case: Case) -> View:
    return View(
        seats=[Seat(PeerId(name), stage, 1.0, name) for stage, names in enumerate(case.holders) for name in names],
        num_stages=case.num_stages,
        num_microbatches=case.microbatches,
        network=case.network,
        hop_bytes=int(case.sent_bytes / case.microbatches),
        stage_s=[seconds / (3 * case.microbatches) for seconds in case.stage_s],
    )


def price(case: Case, rung: str, stage: int, lost: Collection[str], kept: Mapping[int, Sequence[str]]) -> Price | str:
    """What ``rung`` asks to bring back a stage that lost peers, or why it cannot serve.

    Raises:
        ValueError: there is no such rung.
    """
    left = [name for name in case.holders[stage] if name not in lost]
    here, state = case.holders[stage][0], case.state_bytes(stage)
    compute_s = case.stage_s[stage] if case.stage_s else 0.0
    match rung:
        case "replica":
            return Price(0.0, compute_s / 2) if left else "nobody else holds it"
        case "shadow" | "journal":
            alive = [name for name in kept.get(stage, ()) if name not in lost]
            if not alive:
                return "nobody who keeps it is left" if stage in kept else "nobody keeps it"
            since = case.refresh_every / 2 * case.stream_bytes * case.values[stage] if rung == "journal" else 0.0
            return Price(min(case.transfer_s(name, here, state + since) for name in alive))
        case "replay":
            return _replay(case, stage, lost, compute_s)
        case "checkpoint":
            return Price(case.transfer_s("lead", here, state), case.checkpoint_every / 2 * case.iteration_s)
        case "blend":
            return _blend(case, stage, lost)
        case _:
            raise ValueError(f"there is no rung {rung!r}")


def _replay(case: Case, stage: int, lost: Collection[str], compute_s: float) -> Price | str:
    empty = _empty(case, lost)
    if any(name in lost for s, names in enumerate(case.holders) if s not in empty for name in names):
        return "what others had sent to it is lost with them"
    here, steps = case.holders[stage][0], case.checkpoint_every / 2
    size = steps * case.sent_bytes
    sent = [case.transfer_s(name, here, size) for other in case.beside(stage) for name in case.holders[other]]
    stored = case.transfer_s("lead", here, case.state_bytes(stage))
    return Price(max([stored, *sent]), steps * compute_s)


def _blend(case: Case, stage: int, lost: Collection[str]) -> Price | str:
    if stage in case.ends:
        return "it holds the embedding or the head"
    beside = [other for other in case.beside(stage) if case.blocks[other]]
    gone = sorted(set(beside) & set(_empty(case, lost)))
    if gone or not beside:
        return f"its neighbours {gone} are lost with it" if gone else "no neighbour has decoder blocks"
    kinds = 2 if case.moments == "neighbours" else 1
    sources = [(other, next(name for name in case.holders[other] if name not in lost)) for other in beside]
    here = case.holders[stage][0]
    transfers = [case.transfer_s(name, here, VALUE_BYTES * kinds * case.values[other]) for other, name in sources]
    return Price(max(transfers), case.jump_iterations * case.iteration_s)


def _empty(case: Case, lost: Collection[str]) -> list[int]:
    return [stage for stage, names in enumerate(case.holders) if all(name in lost for name in names)]


def judge(case: Case, lost: Collection[str]) -> Verdict:
    """What becomes of the loss of these peers."""
    kept = keepers(case)
    empty = _empty(case, lost)
    chosen: dict[int, str] = {}
    prices: dict[int, Price] = {}
    whys: list[str] = []
    for stage, names in enumerate(case.holders):
        if not any(name in lost for name in names):
            continue
        said: list[str] = []
        survives = any(name not in lost for name in names) and case.ladder[:1] != ("checkpoint",)
        for rung in ("replica",) if survives else case.ladder:
            asked = price(case, rung, stage, lost, kept)
            if isinstance(asked, Price):
                chosen[stage], prices[stage] = rung, asked
                break
            said.append(f"{rung}: {asked}")
        else:
            whys.append(f"stage {stage}: {', '.join(said) or 'the ladder is empty'}")
    if "replay" in chosen.values() and "checkpoint" not in chosen.values():  # they need each other's words
        for stage in empty:
            asked = price(case, "replay", stage, lost, kept)
            if isinstance(asked, Price):
                chosen[stage], prices[stage] = "replay", asked
    return Verdict(
        lost=tuple(sorted(lost)),
        stages=tuple(empty),
        rungs={} if whys else chosen,
        exact=not whys and "blend" not in chosen.values(),
        seconds=float("inf") if whys else _seconds(case, chosen, prices, waits=bool(empty)),
        why="; ".join(whys),
    )


def _seconds(case: Case, chosen: Mapping[int, str], prices: Mapping[int, Price], *, waits: bool) -> float:
    """Transfers go on side by side; what approximations lose, and what stages compute in turn again, adds up."""
    rolls_back = "checkpoint" in chosen.values()
    parts = {stage: one for stage, one in prices.items() if not rolls_back or chosen[stage] == "checkpoint"}
    if waits or rolls_back:
        wait_s = case.start_s + max((one.transfer_s for one in parts.values()), default=0.0) + case.iteration_s / 2
    else:
        wait_s = 0.0
    in_turn = [one.again_s for stage, one in parts.items() if chosen[stage] in ("blend", "replay")]
    repeated = [one.again_s for stage, one in parts.items() if chosen[stage] not in ("blend", "replay")]
    return case.detection_s + wait_s + sum(in_turn) + max(repeated, default=0.0)


def losses(case: Case) -> Iterator[tuple[str, frozenset[str]]]:
    """In words, and who: one peer of each stage that has several, each whole stage, each pair of adjacent ones.

    And, where peers keep stages for each other, each stage together with one that keeps it.
    """
    for stage, names in enumerate(case.holders):
        if len(names) > 1:
            yield f"one of stage {stage}", frozenset(names[:1])
    for stage, names in enumerate(case.holders):
        yield f"stage {stage}", frozenset(names)
    for stage in range(case.num_stages):
        for other in case.beside(stage):
            if other == (stage + 1) % case.num_stages and (other > stage or case.num_stages > 2):
                yield f"stages {stage} and {other}", frozenset(case.holders[stage] + case.holders[other])
    home = {name: stage for stage, names in enumerate(case.holders) for name in names}
    for stage, names in keepers(case).items():
        others = sorted({home[name] for name in names} - set(case.beside(stage)))
        if others:
            gone = frozenset(name for other in (stage, *others) for name in case.holders[other])
            yield f"stage {stage} and {', '.join(map(str, others))}, its keeper{'s' if len(others) > 1 else ''}", gone


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """What a rung costs while nobody is lost.

    Attributes:
        bytes: that the busiest peer sends more, per iteration on average.
        link_s: how long that takes it on the slowest of its links.
        exposed_s: of that, what nothing hides: the rest goes on while the stages before it still go backward.
        kept_bytes: what the busiest peer keeps for others, at most.
    """

    bytes: float
    link_s: float
    exposed_s: float
    kept_bytes: float


def steady_cost(case: Case, rung: str) -> Steady:
    """What a rung costs while nobody is lost; snapshots are taken between iterations, so that nothing hides them."""
    places = keepers(msgspec.structs.replace(case, ladder=(rung,)))
    sent, links, exposed = [0.0], [0.0], [0.0]
    kept = dict.fromkeys((name for names in case.holders for name in names), 0.0)
    for stage, names in enumerate(case.holders):
        values, state = case.values[stage], case.state_bytes(stage)
        size = {
            "shadow": float(case.stream_bytes * values),
            "journal": case.stream_bytes * values + state / case.refresh_every,
            "checkpoint": state / case.checkpoint_every,
            "replay": state / case.checkpoint_every,
        }.get(rung, 0.0)
        to = places.get(stage, ()) if rung in ("shadow", "journal") else ("lead",) if size else ()
        taken = [case.transfer_s(names[0], name, size) for name in to]
        sent.append(size * len(to))
        links.append(max(taken, default=0.0))
        hidden_s = head_start_s(_view(case), stage) if rung in ("shadow", "journal") else 0.0
        exposed.append(max(0.0, links[-1] - hidden_s))
        for name in places.get(stage, ()):
            kept[name] += state + (case.refresh_every * case.stream_bytes * values if rung == "journal" else 0.0)
        if rung == "replay":
            for name in names:
                kept[name] += 2 * case.sent_bytes * case.checkpoint_every
    return Steady(bytes=max(sent), link_s=max(links), exposed_s=max(exposed), kept_bytes=max(kept.values()))
