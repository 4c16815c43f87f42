"""Ensembles over real processes."""

from __future__ import annotations

import asyncio

import pytest

import ensemble_worlds
from talkoot.world.real.host import RealHost
from talkoot.world.real.peer import Settings


@pytest.mark.parametrize("check", ensemble_worlds.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise(check, tmp_path):
    async def main():
        host = RealHost(
            Settings(run="test", name="lead", seed=7, folder=str(tmp_path)), preload=("torch", "ensemble_toys")
        )
        try:
            await check(host, tmp_path)
        finally:
            await host.dismiss()
            await host.close()

    asyncio.run(main())
