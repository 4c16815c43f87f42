"""What the command line asks of ``talkoot plan``, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from talkoot.core.errors import TalkootError, nearest

Quotas: TypeAlias = Literal["equal", "free"]
QUOTAS: tuple[Quotas, ...] = ("equal", "free")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for; see :func:`talkoot.cli.app.plan`. None = not said."""

    network: str | None = None
    nodes: int | None = None
    stages: int | None = None
    visits: int | None = None
    slots: int | None = None
    microbatches: int | None = None
    quotas: str | None = None
    placement: str | None = None
    seed: int | None = None
    budget_s: float | None = None
    contention: bool = False
    failures: bool = False
    accept_outliers: bool = False
    out: Path | None = None
    timeline: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be done, before anything is computed.

        Raises:
            TalkootError: flags without a network, unknown quotas, or a file that cannot be written.
        """
        if self.network is None:
            given = {**msgspec.structs.asdict(self), "failures": None}  # of these, a plain recipe knows its own
            said = [name for name, value in given.items() if value not in (None, False)]
            if said:
                flag = f"--{said[0].replace('_', '-')}"
                raise bad(flag, f"{flag} says how to plan on a network, and none is named", "add --network NAME")
        if self.quotas not in (None, *QUOTAS):
            raise bad("--quotas", f"there are no quotas {self.quotas!r}; {nearest(self.quotas, QUOTAS)}", "say one")
        if self.timeline is not None and self.timeline.suffix not in (".html", ".json"):
            raise bad("--timeline", f"{self.timeline} is neither .html nor .json", "name a file with either ending")
        for path in (self.out, self.timeline):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise bad(str(path), "no file can be written there", "name a file in a folder that exists")


def bad(where: str, why: str, next: str) -> TalkootError:
    """A refusal of something on the command line."""
    return TalkootError("the plan cannot be made", where=where, why=why, next=next)
