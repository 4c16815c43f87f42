"""The real world: what every world promises, over processes, signals and sockets."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import world_conformance as conformance

from talkoot.world.real.host import RealHost
from talkoot.world.real.peer import Settings


def run_real(check, folder, **settings):
    async def main():
        host = RealHost(
            Settings(run="test", name="lead", seed=conformance.SEED, folder=str(folder), **settings),
            preload=("world_conformance",),
        )
        try:
            return await check(host)
        finally:
            await host.dismiss()
            await host.close()

    result = asyncio.run(main())
    assert not multiprocessing.active_children()
    return result


@pytest.mark.parametrize("encrypt", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise(check, encrypt, tmp_path):
    run_real(check, tmp_path, encrypt=encrypt)
