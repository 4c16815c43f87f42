"""The wire: what was forged, changed, redirected, replayed or cut never reaches a program."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talkoot.core.codec import decode, encode
from talkoot.core.keys import Key
from talkoot.world.api import FAILED, HELLO, LOST, Blank
from talkoot.world.base import MAX_BODY_BYTES, MAX_FRAMES, MAX_TOPIC
from talkoot.world.real.wire import Address, Header, Wire, read_address, write_address

ENDPOINT = "tcp://127.0.0.1:5000"


def pair(run_a="run", run_b="run"):
    """Two peers that met."""
    wires = Wire(Key(), run_a), Wire(Key(), run_b)
    for one, other in (wires, wires[::-1]):
        peer = other._key.peer
        one.meet(peer, read_address(peer, other.address(ENDPOINT, "")))
    return wires


def packed(a, b, topic="topic", frames=(b"first", bytearray(b"second"), b""), **fields):
    parts = a.pack(b._key.peer, topic, b"body", frames, fields.get("generation", 3), fields.get("step", 4))
    return [bytes(part) for part in parts]


def resealed(a, b, parts, **changes):
    """The message with other header fields, sealed by the sender's own hand: a dishonest acquaintance."""
    header = msgspec.structs.replace(decode(parts[0], Header), **changes)
    raw = encode(header)
    if header.topic in (HELLO, FAILED):
        return [raw, a._key.sign(raw), *parts[2:]]
    from talkoot.world.real.wire import HEADER_NONCE, _nonce

    return [raw, a._seal[b._key.peer].encrypt(_nonce(header.sequence, HEADER_NONCE), b"", raw), *parts[2:]]


def test_a_message_arrives_as_it_was_sent():
    a, b = pair()
    message = b.open(packed(a, b))
    assert (message.sender, message.topic, message.body) == (a._key.peer, "topic", b"body")
    assert (message.generation, message.step) == (3, 4)
    assert [bytes(frame) for frame in message.frames] == [b"first", b"second", b""]
    assert b.refused == {}
    assert b.open(packed(b, a)) is None  # its own
    assert a.open(packed(b, a)).sender == b._key.peer


def test_any_changed_bit_is_refused():
    a, b = pair()
    parts = packed(a, b)
    for index, part in enumerate(parts):
        for position in range(len(part)):
            changed = bytearray(part)
            changed[position] ^= 1 << position % 8
            assert b.open([*parts[:index], bytes(changed), *parts[index + 1 :]]) is None
    assert b.refused["bad tag"] > 0
    assert sum(b.refused.values()) == sum(map(len, parts))
    assert b.open(parts) is not None


CHANGES = {
    "protocol": 9,
    "run": "other",
    "generation": 9,
    "step": 9,
    "sender": "f" * 64,
    "to": "f" * 64,
    "sequence": 2**63 - 1,
    "topic": "other",
    "body": b"other",
    "sizes": (5, 6),
    "tags": bytes(48),
}


@pytest.mark.parametrize("field", Header.__struct_fields__)
def test_every_field_is_vouched_for(field):
    a, b = pair()
    parts = packed(a, b)
    changed = msgspec.structs.replace(decode(parts[0], Header), **{field: CHANGES[field]})
    assert b.open([encode(changed), *parts[1:]]) is None
    assert sum(b.refused.values()) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 0}, "unknown protocol version"),
        ({"protocol": 9}, "unknown protocol version"),
        ({"run": "other"}, "not for this peer or run"),
        ({"to": Key().peer}, "not for this peer or run"),
        ({"topic": LOST}, "reserved topic"),
        ({"topic": "x" * (MAX_TOPIC + 1)}, "reserved topic"),
        ({"sizes": (5,)}, "frames cut short"),
        ({"sizes": (5, 6, 1)}, "frames cut short"),
        ({"tags": b""}, "not acquainted"),
        ({"tags": bytes(47)}, "not acquainted"),
        ({"tags": bytes(48)}, "bad tag"),
        ({"sequence": 0}, "bad tag"),
        ({"sequence": -1}, "malformed header"),
        ({"sequence": 2**64 - 1}, "malformed header"),
        ({"sender": Key().peer}, "not acquainted"),
        ({"topic": HELLO}, "bad signature"),
        ({"topic": FAILED}, "bad signature"),
    ],
)
def test_a_dishonest_acquaintance_is_refused_for_a_reason(changes, reason):
    a, b = pair()
    sequence = changes.get("sequence", 0)
    if not 0 <= sequence < 2**63:  # could not even be sealed
        raw = encode(msgspec.structs.replace(decode(packed(a, b)[0], Header), **changes))
        forged = [raw, bytes(16)]
    else:
        forged = resealed(a, b, packed(a, b), **changes)
    assert b.open(forged) is None
    assert b.refused == {reason: 1}


def test_nothing_passes_twice_or_late():
    a, b = pair()
    first, second = packed(a, b), packed(a, b)
    assert b.open(second) is not None
    for stale in (first, second):
        assert b.open(stale) is None
    assert b.refused == {"replayed": 2}


def test_nothing_is_for_somebody_else():
    a, b = pair()
    c = Wire(Key(), "run")
    c.meet(a._key.peer, read_address(a._key.peer, a.address(ENDPOINT, "")))
    assert c.open(packed(a, b)) is None
    assert c.refused == {"not for this peer or run": 1}
    a, b = pair("run", "other run")
    assert b.open(packed(a, b)) is None
    assert b.refused == {"not for this peer or run": 1}


def test_missing_and_surplus_parts():
    a, b = pair()
    parts = packed(a, b)
    for cut in ([], parts[:1], [*parts, b""], parts[:-1], [parts[0], b"", *parts[2:]], [*parts, *[b""] * MAX_FRAMES]):
        assert b.open(cut) is None
    assert b.refused == {"wrong number of parts": 3, "frames cut short": 2, "bad tag": 1}
    assert b.open([*parts[:2], parts[3], parts[2], parts[4]]) is None


def test_hellos_need_no_acquaintance_but_a_signature():
    a, b = Wire(Key(), "run"), Wire(Key(), "run")
    for topic in (HELLO, FAILED):
        parts = packed(a, b, topic, frames=())
        assert b.sender(parts) == (a._key.peer, topic)
        for bad in ([parts[0], bytes(64)], [parts[0], b""], [*parts, b"frame"]):
            assert b.open(bad) is None
        with pytest.raises(ValueError, match="carries no frames"):
            packed(a, b, topic)
    with_frames = resealed(a, b, [*packed(a, b, HELLO, frames=()), b"abc"], sizes=(3,))
    assert b.open(with_frames) is None
    assert b.open(packed(a, b, HELLO, frames=())).topic == HELLO
    assert b.refused == {"bad signature": 5, "frames cut short": 2}
    assert b.open(packed(a, b, "topic", frames=())) is None
    assert b.refused["not acquainted"] == 1


def test_a_hello_does_not_overtake_what_waits_for_the_introduction():
    a, b = Wire(Key(), "run"), Wire(Key(), "run")
    a.meet(b._key.peer, read_address(b._key.peer, b.address(ENDPOINT, "")))
    early, hello = packed(a, b), packed(a, b, HELLO, frames=())
    assert b.open(hello) is not None
    b.meet(a._key.peer, read_address(a._key.peer, a.address(ENDPOINT, "")))
    assert b.open(early) is not None
    assert b.open(hello) is None
    assert b.open(early) is None


def test_a_restarted_identity_is_understood_and_its_old_messages_are_not():
    key, b = Key(), Wire(Key(), "run")
    old, new = Wire(key, "run"), Wire(key, "run")
    stale: list[list[bytes]] = []
    for life in (old, new):
        b.meet(key.peer, read_address(key.peer, life.address(ENDPOINT, "")))
        life.meet(b._key.peer, read_address(b._key.peer, b.address(ENDPOINT, "")))
        stale.append(packed(life, b))
        assert b.open(packed(life, b)) is not None
    assert b.open(stale[0]) is None
    assert b.open(packed(old, b)) is None


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_random_parts_are_refused_and_counted(parts):
    _, b = PAIR
    before = sum(b.refused.values())
    assert b.open(parts) is None
    claim = b.sender(parts)
    assert claim is None or isinstance(claim[0], str)
    assert sum(b.refused.values()) > before


@given(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from(["topic", HELLO, FAILED, LOST, ""]),
    st.binary(max_size=80),
    st.lists(st.integers(-(2**63), 2**63), max_size=4),
    st.binary(max_size=80),
)
def test_random_headers_of_an_acquaintance_are_refused(sequence, topic, proof, sizes, tags):
    a, b = PAIR
    me = b._key.peer
    raw = encode([1, "run", -5, 2**64 - 1, a._key.peer, me, sequence, topic, b"", sizes, tags])
    frames = [bytes(size) for size in sizes if 0 <= size < 1000]
    assert b.open([raw, proof, *frames]) is None
    assert set(b.refused) <= {
        "malformed header",
        "wrong number of parts",
        "frames cut short",
        "not acquainted",
        "bad tag",
        "bad signature",
        "reserved topic",
    }


PAIR = pair()


def test_what_is_too_large_is_not_sent():
    a, b = pair()
    for topic, body, frames in (
        ("t" * (MAX_TOPIC + 1), b"", []),
        ("t", bytes(MAX_BODY_BYTES + 1), []),
        ("t", b"", [b""] * (MAX_FRAMES + 1)),
        ("t", b"", [Blank(1)]),
        ("t", b"", [Blank(2**31)]),
    ):
        with pytest.raises(ValueError):
            a.pack(b._key.peer, topic, body, frames, 0, 0)
    parts = a.pack(b._key.peer, "t" * MAX_TOPIC, bytes(MAX_BODY_BYTES), [b""] * MAX_FRAMES, 0, 0)
    assert len(b.open([bytes(part) for part in parts]).body) == MAX_BODY_BYTES
    assert b.open([bytes(17 * 2**20), b""]) is None
    assert b.refused == {"malformed header": 1}


CURVE = "#" * 20 + "aZ0!/*?&<>()[]{}@%$."
HALF = "ab" * 32


@pytest.mark.parametrize("curve", ["", CURVE])
def test_addresses_are_signed(curve):
    key = Key()
    text = write_address(key, Address(ENDPOINT, curve, HALF))
    assert read_address(key.peer, text) == Address(ENDPOINT, curve, HALF)
    with pytest.raises(ValueError):
        read_address(Key().peer, text)
    for position in range(len(text)):
        changed = text[:position] + chr(ord(text[position]) ^ 1) + text[position + 1 :]
        with pytest.raises(ValueError):
            read_address(key.peer, changed)


@pytest.mark.parametrize(
    "address",
    [
        Address("ipc:///tmp/x", "", HALF),
        Address("inproc://x", "", HALF),
        Address("tcp://127.0.0.1", "", HALF),
        Address("tcp://127.0.0.1:0", "", HALF),
        Address("tcp://127.0.0.1:65536", "", HALF),
        Address("tcp://127.0.0.1:*", "", HALF),
        Address("tcp://a b:1", "", HALF),
        Address("tcp://:1", "", HALF),
        Address("tcp://a/b;c:1;d:2", "", HALF),
        Address(ENDPOINT, "short", HALF),
        Address(ENDPOINT, "é" * 40, HALF),
        Address(ENDPOINT, "", HALF[:-1]),
        Address(ENDPOINT, "", HALF.upper()),
        Address(ENDPOINT, "", ""),
        Address("tcp://" + "h" * 1000 + ":1", "", HALF),
    ],
)
def test_addresses_that_cannot_be_are_refused_although_signed(address):
    key = Key()
    with pytest.raises(ValueError):
        read_address(key.peer, write_address(key, address))


@pytest.mark.parametrize("text", ["", "#", "###", "x#y#z#00", ENDPOINT + "##" + HALF, "#" * 2000, "é" * 50])
def test_nonsense_is_no_address(text):
    with pytest.raises(ValueError):
        read_address(Key().peer, text)
