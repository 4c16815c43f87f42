"""Codec, identifiers, keys, receipts, errors and registries."""

from __future__ import annotations

import copy
import os
import resource
import stat
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talkoot.core import codec
from talkoot.core.codec import decode, encode, negotiate
from talkoot.core.errors import Exit, TalkootError, nearest
from talkoot.core.ids import digest, digest_of_digests, short
from talkoot.core.keys import Key, verify
from talkoot.core.receipt import MAX_RECEIPT_BYTES, Receipt, Signed, Task, body, sign
from talkoot.core.registry import Registry
from talkoot.world.links import Link


class Facts(msgspec.Struct, frozen=True):
    name: str
    counts: dict[str, int]
    values: tuple[float, ...] = ()


KEY = Key.derived("tests", 1)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def receipt(**changes) -> Receipt:
    facts: dict[str, Any] = {"run": "r", "generation": 1, "step": 2, "peer": KEY.peer, "task": Task(op="train.step")}
    return Receipt(**(facts | changes))


# -- codec ---------------------------------------------------------------------------------------------------------


@given(plain)
def test_what_is_encoded_is_decoded(value):
    assert decode(encode(value), Any) == value


@given(st.dictionaries(st.text(), st.integers(-(2**63), 2**63), max_size=20), st.randoms())
def test_equal_values_give_equal_bytes(counts, chance):
    items = list(counts.items())
    chance.shuffle(items)
    assert encode(Facts("x", dict(items))) == encode(Facts("x", counts))
    assert encode({"b": 1, "a": {"d": 1, "c": 2}}) == encode({"a": {"c": 2, "d": 1}, "b": 1})


def test_field_order_is_the_declared_one():
    assert encode(Facts("x", {})) == b"\x83\xa4name\xa1x\xa6counts\x80\xa6values\x90"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode({"name": "x"}),  # a field lacks
        encode({"name": 1, "counts": {}}),
        encode({"name": "x", "counts": {"a": "1"}}),
        encode({"name": "x", "counts": {"a": 1.5}}),
        encode({"name": "x", "counts": {}, "values": [None]}),
        encode(["x", {}, []]),
        encode(Facts("x", {}))[:-1],
        encode(Facts("x", {})) + b"\0",
        b"\x81\xa4\xff\xff\xff\xff\xc0",  # not UTF-8
    ],
)
def test_decoding_is_strict(data):
    with pytest.raises(ValueError, match="not a Facts"):
        decode(data, Facts)


def test_size_limit_counts_bytes():
    with pytest.raises(ValueError, match="9 bytes where at most 8"):
        decode(bytes(9), bytes, limit=8)
    wide = memoryview(encode(bytes(62))).cast("Q")  # 8 elements, 64 bytes
    with pytest.raises(ValueError, match="64 bytes where at most 63"):
        decode(wide, bytes, limit=63)
    assert len(decode(memoryview(encode(bytes(62))), bytes, limit=64)) == 62
    assert codec.MAX_DECODE_BYTES <= 2**26


HOSTILE = [
    b"\x91" * 100_000,  # deep
    b"\x81\xa1a" * 50_000,
    b"\xdd\xff\xff\xff\xff",  # long
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x81\x80\xc0",  # a map as a key
    b"\x81\x90\xc0",
    b"\xd6\xff\xff\xff\xff\xff",  # times
    b"\xd7\xff" + b"\xff" * 8,
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8" + bytes(6),
    b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",  # a pickle
]
KINDS = [Any, Facts, Receipt, Signed, Task, Link, list[int], tuple[str, ...], dict[str, bytes], msgspec.Raw]


def decode_or_refuse(data, kind):
    try:
        decode(data, kind)
    except ValueError:
        return


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_hostile_bytes_raise_nothing_but_value_errors(kind):
    for data in HOSTILE:
        decode_or_refuse(data, kind)


@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_random_bytes_raise_nothing_but_value_errors(data, kind):
    decode_or_refuse(data, kind)


def test_a_value_that_its_own_type_refuses_is_a_value_error():
    with pytest.raises(ValueError, match="make no sense"):
        decode(encode({"loss": 2.0}), Link)


@pytest.mark.parametrize(
    ("oldest", "newest", "ours", "expected"),
    [
        (1, 1, (1, 1), 1),
        (1, 9, (1, 1), 1),
        (2, 5, (1, 3), 3),
        (1, 2, (2, 4), 2),
        (3, 3, (1, 3), 3),
        (2, 9, (1, 1), "this machine"),
        (1, 1, (2, 4), "the other peer"),
        (5, 9, (2, 4), "this machine"),
        (3, 2, (1, 4), "the other peer"),
        (9, 2, (1, 4), "the other peer"),
        (-1, 0, (1, 4), "the other peer"),
    ],
)
def test_negotiation(monkeypatch, oldest, newest, ours, expected):
    monkeypatch.setattr(codec, "OLDEST_PROTOCOL", ours[0])
    monkeypatch.setattr(codec, "PROTOCOL", ours[1])
    if isinstance(expected, int):
        assert negotiate(oldest, newest, who="peer x") == expected
        return
    with pytest.raises(TalkootError) as caught:
        negotiate(oldest, newest, who="peer x")
    assert caught.value.next.endswith(expected)
    assert caught.value.where == "peer x"
    assert caught.value.code is Exit.UNREACHABLE
    assert f"{oldest}..{newest}" in caught.value.why


# -- ids -----------------------------------------------------------------------------------------------------------


def test_digests_depend_on_content_and_purpose():
    assert digest(b"x") == digest(memoryview(b"x"))
    assert len({digest(b"x"), digest(b"y"), digest(b"x", "blob"), digest(b"x", "chain")}) == 4
    # BLAKE2b-256 of nothing, from the reference implementation.
    assert digest(b"") == "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
    with pytest.raises(ValueError):
        digest(b"x", "a purpose that is too long")
    assert short(digest(b"")) == "0e5751c0"


pairs = st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), max_size=5)


@given(pairs, pairs, st.randoms())
def test_named_digests_do_not_collide_and_ignore_order(one, other, chance):
    shuffled = list(one)
    chance.shuffle(shuffled)
    assert digest_of_digests(one) == digest_of_digests(shuffled)
    assert (digest_of_digests(one) == digest_of_digests(other)) == (sorted(one) == sorted(other))


def test_a_value_cannot_pose_as_another_entry():
    honest = [("a", "x"), ("b", "y")]
    for forged in ("x;1:b=y", "x;1:b=1:y", "1:x;1:b=1:y"):
        assert digest_of_digests([("a", forged)]) != digest_of_digests(honest)


# -- keys ----------------------------------------------------------------------------------------------------------


def test_signatures():
    key, other = Key(), Key()
    signature = key.sign(b"data")
    assert verify(key.peer, signature, b"data")
    assert not verify(other.peer, signature, b"data")
    assert not verify(key.peer, signature, b"datb")
    for position in range(64):
        changed = bytearray(signature)
        changed[position] ^= 1
        assert not verify(key.peer, bytes(changed), b"data")


def test_rfc_8032_vector():
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    key = Key(secret)
    assert key.peer == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")


def test_malformed_input_is_not_a_signature():
    key = Key()
    signature = key.sign(b"data")
    peers = [key.peer.upper(), key.peer[:-1], key.peer + "0", key.peer[:62] + "  ", "é" * 64, "", "f" * 64, "z" * 64]
    for peer in peers:
        assert not verify(peer, signature, b"data"), peer
    for bad in (b"", signature[:-1], signature + b"\0", bytes(64)):
        assert not verify(key.peer, bad, b"data")


def test_keys_on_disk(tmp_path):
    path = tmp_path / "key"
    key = Key()
    previous = os.umask(0)
    try:
        key.save(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Key.load(path).peer == key.peer
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Key().save(path)
    assert path.read_bytes() == before
    path.write_bytes(before[:31])
    with pytest.raises(TalkootError, match="not a talkoot key") as caught:
        Key.load(path)
    assert (caught.value.where, caught.value.why) == (str(path), "it holds 31 bytes, a key has 32")


def test_derived_keys_are_functions_of_their_parts():
    assert Key.derived(1, "a").peer == Key.derived(1, "a").peer
    assert len({Key.derived(*parts).peer for parts in ((1, "a"), ("1", "a"), ("1a",), (1, "a", 1), ())}) == 5
    with pytest.raises(ValueError):
        Key(b"short")


def test_a_full_disk_leaves_no_half_key(tmp_path):
    limited = "import pathlib, sys; from talkoot.core.keys import Key; Key().save(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path / "key")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert not (tmp_path / "key").exists()


# -- receipts ------------------------------------------------------------------------------------------------------


def test_receipts_open_and_carry_their_facts():
    facts = Facts("loss", {"a": 1}, (0.5,))
    signed = sign(receipt(body=body(facts), parents=("p",), outputs={"o": "d"}), KEY)
    opened = signed.open()
    assert opened == receipt(body=opened.body, parents=("p",), outputs={"o": "d"})
    assert opened.read(Facts) == facts
    assert opened.op == "train.step"
    assert signed.id == digest(signed.raw, "receipt")
    assert decode(encode(signed), Signed) == signed
    with pytest.raises(ValueError):
        opened.read(Link)


def test_any_changed_byte_is_refused():
    signed = sign(receipt(body=body(Facts("x", {}))), KEY)
    for position in range(len(signed.raw)):
        for bit in (1, 128):
            raw = bytearray(signed.raw)
            raw[position] ^= bit
            with pytest.raises(ValueError):
                Signed(bytes(raw), signed.signature).open()
    for position in range(len(signed.signature)):
        signature = bytearray(signed.signature)
        signature[position] ^= 1
        with pytest.raises(ValueError, match=f"not {KEY.peer[:8]}'s"):
            Signed(signed.raw, bytes(signature)).open()
    for raw in (signed.raw[:-1], signed.raw + b"\0", b""):
        with pytest.raises(ValueError):
            Signed(raw, KEY.sign(raw)).open()


def test_a_peer_signs_only_its_own():
    with pytest.raises(ValueError, match="only its own"):
        sign(receipt(), Key())
    raw = encode(receipt())
    with pytest.raises(ValueError, match="signature"):
        Signed(raw, Key().sign(raw)).open()


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": 2**63},
        {"generation": -1},
        {"cost": float("nan")},
        {"cost": float("inf")},
        {"cost": -1.0},
        {"started": float("nan")},
        {"ended": float("-inf")},
        {"task": Task(op="x", deadline=float("nan"))},
        {"task": Task(op="x", price=-5)},
        {"task": Task(op="x", price=2**63)},
        {"version": 99},
        {"version": 0},
        {"outputs": {"x": "y" * MAX_RECEIPT_BYTES}},
    ],
)
def test_figures_that_make_no_sense_are_refused_although_signed(changes):
    with pytest.raises(ValueError):
        sign(receipt(**changes), KEY).open()


def test_extreme_figures_pass():
    signed = sign(receipt(step=2**63 - 1, cost=0, started=1.8e9, task=Task(op="x", seed=-(2**63))), KEY)
    assert signed.open().step == 2**63 - 1


# -- errors and registries -----------------------------------------------------------------------------------------


def test_errors_say_what_where_why_and_next():
    problem = TalkootError("it broke", where="here", why="because", next="mend it", code=Exit.FAILED_CHECK)
    lines = str(problem).splitlines()
    assert lines == ["it broke", "  where: here", "  why:   because", "  next:  mend it"]
    twin = copy.copy(problem)  # through __reduce__, as between processes
    assert str(twin) == str(problem)
    assert (type(twin), twin.code) == (TalkootError, Exit.FAILED_CHECK)
    assert [int(code) for code in Exit] == [0, 1, 2, 3, 4, 130]
    assert TalkootError("a", where="b", why="c", next="d").code is Exit.BAD_INPUT


def test_nearest():
    assert nearest("avrage", ["average", "gossip"]) == "did you mean 'average'?"
    assert nearest("xyz", ["b", "a"]) == "known: a, b"


def test_registry():
    methods: Registry[int] = Registry("method")
    assert methods.register("mean")(1) == 1
    methods.register("gossip")(2)
    assert list(methods) == ["gossip", "mean"]
    assert "mean" in methods
    assert methods["gossip"] == 2
    with pytest.raises(ValueError, match="registered twice"):
        methods.register("mean")(3)
    with pytest.raises(TalkootError, match="unknown method 'maen'") as caught:
        methods["maen"]
    assert caught.value.why == "did you mean 'mean'?"
    assert caught.value.next == "use one of: gossip, mean"
