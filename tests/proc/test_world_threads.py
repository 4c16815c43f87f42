"""A peer computes with as many threads as it was given, also where torch was loaded before it could know."""

from __future__ import annotations

import test_world_real as real
import torch

import world_conformance as conformance


async def program(world, argument):
    await world.send(world.lead, "hello", conformance.Hello(world.name, world.address))
    await world.send(world.lead, "got", conformance.Number(torch.get_num_threads()))
    await world.receive("never")


def test_threads(tmp_path):
    async def check(host):
        cast = conformance.Cast(host)
        for name, threads in (("a", 1), ("b", 3)):
            await cast.enter(name, program="test_world_threads:program", threads=threads)
            assert (await cast.next("got")).read(conformance.Number).number == threads

    real.run_real(check, tmp_path)
