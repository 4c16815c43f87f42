"""Probing a simulated network finds what it was configured with."""

from __future__ import annotations

from itertools import permutations

import pytest

from talkoot.core.errors import Exit, TalkootError
from talkoot.model.config import ModelConfig
from talkoot.plan.networks import named_network
from talkoot.plan.profile import Profile, dump_profile, load_profile, to_network
from talkoot.train.probe import Probe, probe
from talkoot.train.recipe import peer_names
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import PEER_FLOPS, Simulation

JOB = Probe(config=ModelConfig.from_depth(4, 1024), context=128, samples=4)


def probed(network: Network, count: int, speeds: tuple[float, ...] = (), job: Probe = JOB) -> Profile:
    return Simulation(network=network).run(lambda world: probe(world, peer_names(count), job, speeds))


def test_latency_and_bandwidth_of_a_published_network_are_recovered():
    network = to_network(named_network("gcp12", 5), peer_names(5))
    found = probed(network, 5)
    for one, other in permutations(peer_names(5), 2):
        assert found.link(one, other).latency_s == pytest.approx(network.link(one, other).latency_s, rel=0.05)
        assert found.link(one, other).bytes_per_s == pytest.approx(network.link(one, other).bytes_per_s, rel=0.05)


@pytest.mark.parametrize("rate", [1e5, 1e7, 1e9, 1e11])
@pytest.mark.parametrize("latency", [1e-4, 0.3])
def test_fast_and_slow_links_are_recovered(rate, latency):
    found = probed(Network(default=Link(latency_s=latency, bytes_per_s=rate)), 2).link("alder", "birch")
    assert found.latency_s == pytest.approx(latency, rel=0.05, abs=0.005 if rate < 1e6 else 1e-4)
    assert found.bytes_per_s == pytest.approx(rate, rel=0.05)


def test_directions_are_told_apart_in_bandwidth():
    links = {"alder->birch": Link(bytes_per_s=1e6), "birch->alder": Link(bytes_per_s=1e8)}
    found = probed(Network(links=links), 2)
    assert found.link("alder", "birch").bytes_per_s == pytest.approx(1e6, rel=0.05)
    assert found.link("birch", "alder").bytes_per_s == pytest.approx(1e8, rel=0.05)


def test_jitter_and_loss_do_not_mislead_it_much():
    found = probed(Network(default=Link(latency_s=0.05, bytes_per_s=1e7, jitter_s=0.005, loss=0.05)), 2)
    assert found.link("alder", "birch").latency_s == pytest.approx(0.05, rel=0.15)
    assert found.link("alder", "birch").bytes_per_s == pytest.approx(1e7, rel=0.15)


def test_speeds_are_recovered_and_the_file_loads_back(tmp_path):
    found = probed(Network(), 3, speeds=(1.0, 0.5))
    seconds = [node.layer_sample_s for node in found.nodes]
    assert seconds[0] == pytest.approx(JOB.config.layer_flops(128)[1] * 128 / PEER_FLOPS)
    assert seconds == pytest.approx([seconds[0], 2 * seconds[0], seconds[0]])
    assert [node.slots for node in found.nodes] == [3, 3, 3]
    path = tmp_path / "net.toml"
    path.write_text(dump_profile(found))
    assert load_profile(path) == found


def test_one_peer_alone_is_a_profile_too():
    assert len(probed(Network(), 1).nodes) == 1


def test_a_link_that_does_not_answer_is_reported():
    with pytest.raises(TalkootError) as caught:
        probed(Network(links={"alder->birch": Link(latency_s=500.0)}), 2)
    assert caught.value.code == Exit.UNREACHABLE
    assert "alder" in caught.value.where
