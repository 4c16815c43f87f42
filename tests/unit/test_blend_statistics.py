"""Statistics: exact sums, signed files, and suspicion of what strangers send."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from talkoot.blend.statistics import Gram, Histogram, Provenance, Source, Statistics, merge, read_header
from talkoot.blend.statistics.histogram import pair_buckets
from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest, digest_of_digests
from talkoot.core.keys import Key

FEATURES = digest(b"features")

torch.set_num_threads(1)


def owner(name: str) -> Key:
    return Key.derived("owner", name)


def statistics(rows: torch.Tensor, ids: list[int], *, name: str = "a", domain: str = "d") -> Statistics:
    gram, histogram = Gram(rows.shape[1]), Histogram(20, 16)
    gram.add(rows)
    histogram.add(ids)
    source = Source(owner(name).peer, digest(f"{name} {ids}".encode()))
    provenance = Provenance(features=FEATURES, domain=domain, sources=(source,), code="1")
    return Statistics(provenance, {"layer.0": gram}, histogram, documents=1, tokens=len(ids))


def example(seed: int = 0, name: str = "a") -> Statistics:
    torch.manual_seed(seed)
    return statistics(torch.randn(30, 4), torch.randint(20, (50,)).tolist(), name=name)


def stored(tmp_path: Path, one: Statistics | None = None) -> Path:
    path = tmp_path / "s.safetensors"
    (one or example()).write(path, owner("a"))
    return path


def test_a_gram_matrix_is_the_sum_of_outer_products():
    rows = torch.randn(9, 3, dtype=torch.float64)
    gram = Gram(3)
    gram.add(rows[:4])
    gram.add(rows[4:])
    extended = torch.cat([rows, torch.ones(9, 1)], dim=1)
    assert torch.allclose(gram.matrix, extended.T @ extended, atol=1e-12)
    assert torch.equal(gram.total, gram.matrix[:, -1])
    assert gram.count == 9


def test_a_packed_matrix_comes_back_to_the_bit():
    gram = example().grams["layer.0"]
    again = Gram.unpacked(gram.width, gram.packed())
    assert torch.equal(again.matrix, gram.matrix)
    assert torch.equal(gram.matrix, gram.matrix.T)
    assert len(gram.packed()) == 15


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused_and_nothing_is_counted(strange):
    gram = Gram(2)
    gram.add(torch.ones(3, 2))
    with pytest.raises(ValueError, match="not finite"):
        gram.add(torch.tensor([[1.0, 1.0], [strange, 0.0]]))
    assert gram.count == 3
    assert float(gram.matrix.sum()) == 27


def test_pairs_of_neighbours_are_counted_within_a_document_only():
    apart, together = Histogram(20, 1 << 20), Histogram(20, 1 << 20)
    apart.add([1, 2])
    apart.add([3, 4])
    together.add([1, 2, 3, 4])
    assert torch.equal(apart.unigrams, together.unigrams)
    assert int(apart.bigrams.sum()) == 2
    assert int(together.bigrams.sum()) == 3


def test_buckets_are_used_evenly():
    first, second = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    pairs = torch.stack([first.flatten(), second.flatten()], dim=1).flatten()
    counts = torch.bincount(pair_buckets(pairs, 512)[::2], minlength=512)
    assert int(counts.sum()) == 40_000
    assert 35 < int(counts.min()) < int(counts.max()) < 125  # 78 on average


@pytest.mark.parametrize("wrong", [[-1], [20]])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    with pytest.raises(ValueError, match="vocabulary"):
        Histogram(20).add(wrong)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 3, 7]))
def test_shuffled_peers_give_the_bits_of_one(seed, peers):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    documents = [torch.randint(20, (chance.randint(2, 30),)) for _ in range(14)]
    rows = [torch.randn(len(document), 4, dtype=torch.float64) for document in documents]
    whole = statistics(torch.cat(rows), torch.cat(documents).tolist())
    histogram = Histogram(20, 16)
    for document in documents:
        histogram.add(document)
    parts = []
    for peer in range(peers):
        mine = range(peer, 14, peers)
        part = statistics(torch.cat([rows[i] for i in mine]), [0], name=str(peer))
        counted = Histogram(20, 16)
        for i in mine:
            counted.add(documents[i])
        parts.append(replace(part, histogram=counted, tokens=counted.tokens))
    chance.shuffle(parts)
    merged = merge(parts)
    chance.shuffle(parts)
    assert merged.histogram == histogram
    assert merged.tokens == whole.tokens
    assert merged == merge(parts)
    difference = merged.grams["layer.0"].matrix - whole.grams["layer.0"].matrix
    assert float(difference.abs().max()) < 1e-10


def test_a_text_counts_once_whoever_counted_it():
    one, two = example(1), example(2)
    with pytest.raises(TalkootError, match="twice"):
        merge([one, one])
    source = Source(owner("b").peer, one.provenance.sources[0].dataset)
    copied = replace(two, provenance=msgspec.structs.replace(two.provenance, sources=(source,)))
    with pytest.raises(TalkootError, match="twice"):
        merge([one, copied])
    assert len(merge([one, two]).provenance.sources) == 2


@pytest.mark.parametrize("what", ["features", "domain"])
def test_unlike_statistics_do_not_add_up(what):
    other = example(2)
    other = replace(other, provenance=msgspec.structs.replace(other.provenance, **{what: "other"}))
    with pytest.raises(TalkootError, match=f"unlike {what}"):
        merge([example(1), other])


def test_unlike_contents_do_not_add_up():
    with pytest.raises(TalkootError, match="unlike contents"):
        merge([example(1), replace(example(2), grams={})])
    with pytest.raises(TalkootError, match="nothing to merge"):
        merge([])


def test_a_file_gives_back_what_was_written(tmp_path):
    path = stored(tmp_path)
    assert Statistics.read(path, features=FEATURES) == example()
    assert read_header(path).signer == owner("a").peer


def test_merged_statistics_may_be_signed_by_whoever_merged_them(tmp_path):
    merged = merge([example(1, "a"), example(2, "b")])
    merged.write(tmp_path / "m.safetensors", owner("c"))
    assert Statistics.read(tmp_path / "m.safetensors") == merged
    with pytest.raises(ValueError, match="signed by the peer"):
        example().write(tmp_path / "x.safetensors", owner("b"))


def test_other_features_are_refused_before_a_number_is_read(tmp_path, monkeypatch):
    path = stored(tmp_path)
    monkeypatch.setattr("talkoot.blend.statistics.file.check_sizes", lambda *_: pytest.fail("it went on"))
    with pytest.raises(TalkootError, match="other features"):
        Statistics.read(path, features=digest(b"something else"))


def rewritten(path: Path, *, tensors: dict[str, torch.Tensor] | None = None, key: Key | None = None, **changes) -> Path:
    """The file with other numbers or header fields, signed anew by ``key`` where there is one."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    found = load_file(path) | (tensors or {})
    header = msgspec.json.decode(metadata["statistics"])
    for field, value in changes.items():
        (header if field in header else header["outline"])[field] = value
    if key is not None:
        parts = ((name, digest(part.numpy().tobytes())) for name, part in found.items())
        header["outline"]["content"] = digest_of_digests(parts)
    text = msgspec.json.encode(header)
    signature = key.sign(bytes.fromhex(digest(text, "statistics"))).hex() if key else metadata["signature"]
    save_file(found, path, {"statistics": text.decode(), "signature": signature})
    return path


def test_a_changed_header_or_number_is_noticed(tmp_path):
    with pytest.raises(TalkootError, match="not signed"):
        Statistics.read(rewritten(stored(tmp_path), documents=2))
    unigrams = example().histogram.unigrams.clone()
    unigrams[0] += 1
    with pytest.raises(TalkootError) as caught:
        Statistics.read(rewritten(stored(tmp_path), tensors={"histogram.unigrams": unigrams}))
    assert "changed" in caught.value.why
    with pytest.raises(TalkootError, match="somebody else"):
        Statistics.read(rewritten(stored(tmp_path), key=owner("b"), signer=owner("b").peer))


def broken_grams() -> dict[str, tuple[torch.Tensor, str]]:
    """What a stranger might sign: packed matrices that no rows have."""
    good = example().grams["layer.0"].packed()
    cases = {}
    for name, place, value, message in [
        ("nan", 3, float("nan"), "not finite"),
        ("count", -1, 30.5, "how many rows"),
        ("none", -1, 0.0, "how many rows"),
        ("negative", 0, -1.0, "negative"),
        ("large", 0, 1e30, "too large"),
        ("unlike", 1, 1e4, "semi-definite"),
        ("sum", 4, 1e3, "semi-definite"),  # the last column: more than the squares allow
    ]:
        numbers = good.clone()
        numbers[place] = value
        cases[name] = numbers, message
    return cases


@pytest.mark.parametrize("case", sorted(broken_grams()))
def test_matrices_that_no_rows_have_are_refused(tmp_path, case):
    numbers, message = broken_grams()[case]
    path = rewritten(stored(tmp_path), tensors={"gram.layer.0": numbers}, key=owner("a"))
    with pytest.raises(TalkootError) as caught:
        Statistics.read(path)
    assert message in caught.value.why


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("histogram.unigrams", 0, -1, "negative"),
        ("histogram.unigrams", 0, 1 << 60, "large"),
        ("histogram.unigrams", 0, 1000, "header"),
        ("histogram.bigrams", 0, 1000, "more pairs"),
        ("histogram.full", 0, -1, "out of range"),
        ("histogram.full", 1, 15, "out of order"),
        ("histogram.full", -1, 16, "out of range"),
    ],
)
def test_counts_that_no_text_has_are_refused(tmp_path, name, place, value, message):
    counts = load_file(stored(tmp_path))[name].clone()
    counts[place] = value
    path = rewritten(stored(tmp_path), tensors={name: counts}, key=owner("a"))
    with pytest.raises(TalkootError) as caught:
        Statistics.read(path)
    assert message in caught.value.why


@pytest.mark.parametrize(
    "changes",
    [
        {"grams": {"layer.0": 5}},
        {"grams": {"layer.0": 10**6}},
        {"grams": {}},
        {"histogram": None},
        {"histogram": (10**9, 16, 1)},
        {"histogram": (20, 16, 17)},
    ],
)
def test_sizes_are_checked_before_anything_is_allocated(tmp_path, changes, monkeypatch):
    path = rewritten(stored(tmp_path), key=owner("a"), **changes)
    monkeypatch.setattr(Statistics, "rebuilt", lambda *_: pytest.fail("it went on"))
    with pytest.raises(TalkootError) as caught:
        Statistics.read(path)
    assert "sizes" in caught.value.why


def test_files_that_are_something_else_are_refused(tmp_path):
    path = stored(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(TalkootError, match="cannot be read"):
        Statistics.read(path)
    path.write_bytes(b"hello")
    with pytest.raises(TalkootError, match="cannot be read"):
        Statistics.read(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(TalkootError, match="no statistics"):
        Statistics.read(path)
    with pytest.raises(TalkootError, match="cannot be read"):
        Statistics.read(tmp_path / "none")


def test_a_failed_write_leaves_nothing_unfit(tmp_path):
    with pytest.raises(ValueError, match="no documents"):
        replace(example(), documents=0).write(tmp_path / "x.safetensors", owner("a"))
    assert not list(tmp_path.iterdir())


def test_noise_changes_numbers_and_leaves_them_possible():
    torch.manual_seed(0)
    one = statistics(torch.randn(500, 4), torch.randint(20, (500,)).tolist())
    noisy = one.blurred(3.0, seed=1)
    noisy.check()
    gram, before = noisy.grams["layer.0"], one.grams["layer.0"]
    assert gram.count == before.count
    shift = (gram.matrix - before.matrix)[:4, :4]
    assert 1 < float(shift.std()) < 9  # rows of mean square 1, so three of them
    assert noisy.histogram.unigrams.tolist() != one.histogram.unigrams.tolist()
    assert 1.5 < float((noisy.histogram.unigrams - one.histogram.unigrams).double().std()) < 5
    assert one.blurred(3.0, seed=1) == noisy
    assert one.blurred(3.0, seed=2) != noisy


def test_noise_on_few_rows_still_gives_a_sum_of_squares():
    example().blurred(50.0, seed=3).check()
