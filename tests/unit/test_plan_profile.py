"""A profile refuses what no network is, finds the links it means, and survives its own file."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import Exit, TalkootError
from talkoot.plan.networks import named_network
from talkoot.plan.profile import (
    Node,
    Profile,
    dump_profile,
    first_nodes,
    load_profile,
    outliers,
    to_network,
    to_problem,
)
from talkoot.world.links import Link

FAST = Link(latency_s=0.001, bytes_per_s=1e9)
SLOW = Link(latency_s=0.1, bytes_per_s=1e7)


def profile(*names: str, **fields) -> Profile:
    """Nodes named ``a`` or ``a@place``."""
    nodes = [Node(name=name.partition("@")[0], location=name.partition("@")[2]) for name in names]
    return Profile(name="test", nodes=tuple(nodes), **fields)


def refused(make) -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        make()
    assert caught.value.code == Exit.BAD_INPUT
    assert caught.value.next
    return caught.value


def test_links_are_found_by_name_then_by_location_in_either_direction():
    named, mixed, placed, inside = (Link(latency_s=0.001 * k, bytes_per_s=1e8) for k in (1, 2, 3, 4))
    links = {"a->c": named, "Rome->d": mixed, "Rome->Oslo": placed, "Oslo->Oslo": inside}
    net = profile("a@Rome", "b@Rome", "c@Oslo", "d@Oslo", links=links, local=FAST)
    assert net.link("a", "c") == net.link("c", "a") == named
    assert net.link("b", "d") == net.link("d", "b") == mixed
    assert net.link("b", "c") == placed
    assert net.link("c", "d") == inside
    assert net.link("a", "b") == net.link("a", "a") == FAST
    with pytest.raises(KeyError):
        net.link("a", "nobody")


def test_a_direction_of_its_own_goes_before_the_other_ones():
    net = profile("a", "b", links={"a->b": FAST, "b->a": SLOW})
    assert net.link("a", "b") == FAST
    assert net.link("b", "a") == SLOW


def test_a_disconnected_network_is_refused_with_the_pair_and_what_to_write():
    problem = refused(lambda: profile("a", "b", "c", links={"a->b": FAST, "b->c": FAST}))
    assert "a and c" in problem.why
    assert '"a->c" = {' in problem.next
    refused(lambda: profile("a", "b"))  # to stand nowhere is not to stand together
    profile("a@Rome", "b@Rome")
    profile("a")


@pytest.mark.parametrize(
    ("fields", "where", "why"),
    [
        ({"nodes": ()}, "nodes", "no node"),
        ({"nodes": (Node(name="a"), Node(name="a"))}, "'a'", "name of its own"),
        ({"nodes": (Node(name=""),)}, "''", "name of its own"),
        ({"nodes": (Node(name="a->b"),)}, "'a->b'", "no name"),
        ({"nodes": (Node(name="a\n"),)}, "node", "no name"),
        ({"nodes": (Node(name="a", slots=0),)}, "'a'", "without memory"),
        ({"nodes": (Node(name="a", layer_sample_s=0.0),)}, "'a'", "above 0"),
        ({"nodes": (Node(name="a", layer_sample_s=math.nan),)}, "'a'", "above 0"),
        ({"nodes": (Node(name="a", layer_sample_s=math.inf),)}, "'a'", "above 0"),
        ({"hop_overhead_s": -1.0}, "hop_overhead_s", "at least 0"),
        ({"hop_overhead_s": math.nan}, "hop_overhead_s", "at least 0"),
        ({"links": {"a->B": FAST}}, "a->B", "'B'"),
        ({"links": {"a": FAST}}, "'a'", "->"),
        ({"links": {"a->a": Link(bytes_per_s=math.inf)}}, "a->a", "finite"),
        ({"local": Link(bytes_per_s=math.inf)}, "local", "finite"),
    ],
)
def test_what_no_network_is_gets_refused(fields, where, why):
    problem = refused(lambda: Profile(**{"name": "x", "nodes": (Node(name="a"),), **fields}))
    assert where in problem.where
    assert why in problem.why


def test_a_misspelt_end_of_a_link_gets_the_nearest_name():
    problem = refused(lambda: profile("alder@Rome", "birch@Oslo", links={"Rome->Olso": SLOW}))
    assert "'Oslo'" in problem.why


def test_a_problem_counts_latency_size_and_overhead():
    net = profile("a@Rome", "b@Rome", "c@Oslo", links={"Rome->Oslo": SLOW}, local=FAST, hop_overhead_s=0.5)
    problem = to_problem(net, activation_bytes=1e6, gradient_bytes=1e8, stage_layers=[3, 4], samples=8)
    assert problem.hop_s[0][2] == problem.hop_s[2][1] == pytest.approx(0.1 + 0.1 + 0.5)
    assert problem.hop_s[0][1] == pytest.approx(0.001 + 0.001 + 0.5)
    assert problem.busy_s[0][2] == pytest.approx(0.1)
    assert problem.share_s[0][2] == pytest.approx(10.0 + 0.1 + 0.5)
    assert all(matrix[i][i] == 0 for matrix in (problem.hop_s, problem.busy_s, problem.share_s) for i in range(3))
    assert problem.layer_s == pytest.approx((0.44,) * 3)
    assert problem.forward_s(0, 1) == pytest.approx(0.44 * 4)
    assert (problem.slots, problem.backward_ratio, problem.loss_ratio) == ((3, 3, 3), 1.5, 0.25)


def test_simulated_peers_get_the_profiles_links_and_its_overhead():
    lossy = Link(latency_s=0.1, bytes_per_s=1e7, jitter_s=0.01, loss=0.1)
    net = profile("a", "b", "c", links={"a->b": SLOW, "b->a": FAST, "a->c": lossy, "b->c": FAST}, hop_overhead_s=0.5)
    network = to_network(net, ["x", "y", "z"])
    assert network.link("x", "y") == Link(latency_s=0.6, bytes_per_s=1e7)
    assert network.link("y", "x").latency_s == pytest.approx(0.501)
    assert network.link("x", "z") == network.link("z", "x") == msgspec.structs.replace(lossy, latency_s=0.6)
    with pytest.raises(ValueError):
        to_network(net, ["x", "y"])


# -- files -------------------------------------------------------------------------------------------------------


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(
    lambda text: text.isprintable() and text == text.strip() and "->" not in text
)
amounts = st.floats(1e-9, 1e15)


@st.composite
def profiles(draw):
    count = draw(st.integers(1, 4))
    places = draw(st.lists(names, min_size=count, max_size=count, unique=True))
    nodes = [
        Node(name=f"n{i}", location=place, layer_sample_s=draw(amounts), slots=draw(st.integers(1, 9)))
        for i, place in enumerate(places)
    ]
    link = st.builds(Link, latency_s=st.floats(0, 1e3), bytes_per_s=amounts, loss=st.floats(0, 0.9))
    links = {f"{a}->{b}": draw(link) for i, a in enumerate(places) for b in places[:i]}
    overhead = draw(st.floats(0, 1e3))
    return Profile(name=draw(names), nodes=tuple(nodes), links=links, local=draw(link), hop_overhead_s=overhead)


@settings(max_examples=50, deadline=None)
@given(profiles())
def test_a_dumped_profile_loads_back_equal(tmp_path_factory, net):
    path = tmp_path_factory.mktemp("profile") / "net.toml"
    path.write_text(dump_profile(net), encoding="utf-8")
    assert load_profile(path, accept_outliers=True) == net
    path = path.with_suffix(".json")
    path.write_bytes(msgspec.json.encode(net))
    assert load_profile(path, accept_outliers=True) == net


def test_a_name_is_a_network_and_a_path_is_a_file(tmp_path):
    assert load_profile("gcp12", 20) == named_network("gcp12", 20)
    path = tmp_path / "net"
    path.write_text(dump_profile(named_network("gcp12", 20)))
    assert load_profile(path) == load_profile(str(path)) == named_network("gcp12", 20)
    assert "'gcp12'" in refused(lambda: load_profile("gpc12")).why
    assert "nothing.toml" in refused(lambda: load_profile(tmp_path / "nothing.toml")).where


def test_the_first_nodes_of_a_file_can_be_taken(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text(dump_profile(named_network("gcp12", 20)))
    assert load_profile(path, 3) == first_nodes(named_network("gcp12"), 3)
    assert len(load_profile(path, 3).links) == 3
    for wrong in (0, 21):
        assert str(wrong) in refused(lambda wrong=wrong: load_profile(path, wrong)).why


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("nam = 'x'", "key nam", "'name'"),
        ("name = 'x'\nnodes = [{ nme = 'a' }]", "key nodes[0].nme", "'name'"),
        ("name = 'x'\nnodes = [{ name = 'a' }]\nlocal = { latency = 1 }", "key local.latency", "'latency_s'"),
        ("name = 'x'\nnodes = [{ name = 'a' }]\n[links]\n'a->a' = { byte_per_s = 1 }", "a->a", "'bytes_per_s'"),
        ("name = 'x'\nnodes = [{ name = 'a', slots = 1.5 }]", "slots", "int"),
        ("name = 'x'\nnodes = [{ name = 'a', slots = 0 }]", "'a'", "without memory"),
        ("name = 'x'\nnodes = [{ name = 'a' }]\nlocal = { latency_s = nan }", "links", "nan"),
        ("name = 'x'", "net.toml", "nodes"),
        ("name = = 2", "net.toml", "TOML"),
    ],
)
def test_a_bad_file_is_refused_with_the_key(text, where, why, tmp_path):
    path = tmp_path / "net.toml"
    path.write_text(text)
    problem = refused(lambda: load_profile(path))
    assert where in problem.where
    assert why in problem.why


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"name": "x", "nodes": [], "links": []}', "[" * 100_000])
def test_a_bad_json_file_is_refused(text, tmp_path):
    path = tmp_path / "net.json"
    path.write_text(text)
    refused(lambda: load_profile(path))


# -- outliers ----------------------------------------------------------------------------------------------------


def changed(net: Profile, key: str, **fields) -> Profile:
    links = {**net.links, key: msgspec.structs.replace(net.links[key], **fields)}
    return msgspec.structs.replace(net, links=links)


def test_the_published_unit_error_is_the_only_outlier_of_its_network():
    net = named_network("gcp12")
    assert outliers(net) == []
    found = outliers(changed(net, "NL->London", bytes_per_s=0.00023681640625 * 2**30))
    assert len(found) == 1
    for word in ("NL->London", "254,280", "1024 times less", "260,382,392", "MiB/s for GiB/s"):
        assert word in found[0]


@pytest.mark.parametrize("name", ["gcp12", "dtfm", "random:0"])
@pytest.mark.parametrize("factor", [1 / 1024, 1024, 1 / 8192, 8192])
def test_a_slip_of_any_links_bandwidth_is_found_and_nothing_else(name, factor):
    net = named_network(name)
    for key, link in net.links.items():
        found = outliers(changed(net, key, bytes_per_s=link.bytes_per_s * factor))
        alone = sum(0.5 <= other.latency_s / link.latency_s <= 2 for other in net.links.values()) < 3
        assert [text for text in found if key not in text] == []
        assert len(found) == 1 or alone


def test_a_latency_in_milliseconds_is_found():
    net = named_network("gcp12")
    (found,) = outliers(changed(net, "Belgium->Germany", latency_s=4.0))
    assert "milliseconds" in found
    (found,) = outliers(changed(net, "Belgium->Germany", latency_s=1.0))
    assert "similar bytes_per_s" in found
    assert "milliseconds" in found


def test_a_whole_file_in_wrong_units_is_found():
    net = named_network("gcp12")
    links = {key: Link(latency_s=link.latency_s * 1e3, bytes_per_s=link.bytes_per_s) for key, link in net.links.items()}
    assert len(outliers(msgspec.structs.replace(net, links=links))) == len(links)
    assert "local" in outliers(msgspec.structs.replace(net, local=Link(bytes_per_s=2.0)))[0]


def test_unlike_kinds_of_links_are_no_outliers():
    lan = Link(latency_s=0.0002, bytes_per_s=1.2e8)
    wan = Link(latency_s=0.08, bytes_per_s=1e6)
    links = {"A->B": lan, **{f"{one}->{other}": wan for one in "AB" for other in "CD"}, "C->D": wan}
    assert outliers(profile("1@A", "2@B", "3@C", "4@D", links=links)) == []


def test_a_file_with_an_outlier_is_refused_unless_it_is_accepted(tmp_path):
    net = changed(named_network("gcp12"), "NL->London", bytes_per_s=254280.0)
    path = tmp_path / "net.json"
    path.write_text(json.dumps(msgspec.to_builtins(net)))
    problem = refused(lambda: load_profile(path))
    assert "NL->London" in problem.why
    assert "--accept-outliers" in problem.next
    assert load_profile(path, accept_outliers=True) == net
