"""Prompt routers: what rules compute, exactness over peers, adding and removing, files, bad input."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.blend.router import Counted, Router, Wanted, choose, rules
from talkoot.blend.router.calibration import draw_prompts
from talkoot.blend.router.router import collect
from talkoot.blend.router.votes import token_scores
from talkoot.blend.statistics import Features, Gram, Histogram, Statistics, count, merge
from talkoot.blend.statistics.features import CHUNKS
from talkoot.blend.statistics.histogram import pair_buckets
from talkoot.core.errors import TalkootError
from talkoot.core.keys import Key
from talkoot.model.config import ModelConfig
from talkoot.model.huggingface import save_folder
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes()
WORDS = {
    name: words.split()
    for name, words in {
        "sea": "ship sail wave harbour anchor tide gull mast storm island crew deck",
        "kitchen": "bread salt oven butter spoon onion soup plate flour kettle pepper pan",
        "forest": "oak moss fern deer path birch owl stream root pine fox mushroom",
    }.items()
}

torch.set_num_threads(1)


def documents(domain: str, seed: int, number: int = 12, words: int = 60) -> list[list[int]]:
    chance = random.Random(f"{domain} {seed}")
    return [
        TOKENIZER.encode(" ".join(chance.choices([*WORDS[domain], "the", "and", "of"], k=words))) for _ in range(number)
    ]


@pytest.fixture(scope="module")
def features() -> Features:
    return Features.random(TOKENIZER, 48, buckets=1 << 12)


@pytest.fixture(scope="module")
def statistics(features: Features) -> dict[str, Statistics]:
    return {name: count(name, documents(name, 0), features, Key.derived(name)) for name in WORDS}


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[list[int]]]:
    return {name: documents(name, 1) for name in WORDS}


def chunks(statistics: Statistics) -> Gram:
    return statistics.grams[CHUNKS]


def test_chunks_are_sums_of_embeddings_and_rest_of_a_document_is_left_out(features):
    ids = torch.arange(2, 2 + 70)
    sums = features.chunk_sums(ids)
    assert torch.equal(sums, torch.stack([features.table[ids[i : i + 32]].double().sum(0) for i in (0, 32)]))
    counted = count("d", [ids.tolist()], features, Key.derived("d"))
    assert chunks(counted).count == 2
    extended = torch.cat([sums, torch.ones(2, 1)], dim=1)
    assert torch.equal(chunks(counted).matrix, extended.T @ extended)


def test_a_document_shorter_than_a_chunk_is_one(features):
    counted = count("d", [[5, 6, 7], [], [8]], features, Key.derived("d"))
    assert (chunks(counted).count, counted.documents, counted.tokens) == (2, 2, 4)
    assert torch.equal(chunks(counted).total[:-1], features.table[[5, 6, 7, 8]].double().sum(0))


def test_a_long_document_is_counted_in_pieces_as_in_one(features, monkeypatch):
    ids = torch.randint(2, 250, (300,))
    whole = count("d", [ids], features, Key.derived("d"))
    monkeypatch.setattr("talkoot.blend.statistics.features._PIECE", 64)
    assert count("d", [ids], features, Key.derived("d")) == whole


def test_a_data_set_is_known_by_its_documents_in_any_order(features):
    one, two = ([[3, 4], [5]], [[5], [3, 4]])
    names = [count("d", these, features, Key.derived("d")).provenance.sources for these in (one, two, [[3, 4]])]
    assert names[0] == names[1] != names[2]


def test_features_are_the_same_everywhere_and_named_by_all_that_matters(features):
    again = Features.random(TOKENIZER, 48, buckets=1 << 12)
    assert torch.equal(again.table, features.table)
    assert again.id == features.id
    assert set(features.table.unique().tolist()) == {-1, 1}
    others = [
        Features.random(TOKENIZER, 48, buckets=1 << 12, seed=1),
        Features.random(TOKENIZER, 48, buckets=1 << 13),
        Features.random(Tokenizer.characters("abc"), 48, buckets=1 << 12),
        Features(TOKENIZER, None, 1 << 12),
        Features.one_hot(TOKENIZER, buckets=1 << 12),
    ]
    assert len({features.id, *(other.id for other in others)}) == 6
    with pytest.raises(ValueError, match="rows"):
        Features(TOKENIZER, features.table[:-1])


def model(tmp_path: Path, tokens: int = 260) -> tuple[Path, Stage]:
    config = ModelConfig(
        vocab_size=tokens, width=8, layers=1, heads=2, kv_heads=2, head_dim=4, hidden=16, bos_id=0, eos_ids=(1,)
    )
    return tmp_path / "model", Stage(config, 0, config.layer_count, seed=0)


def test_embeddings_of_a_model_are_rounded_to_bytes(tmp_path):
    folder, stage = model(tmp_path)
    save_folder(folder, stage.config, stage.tensors(), TOKENIZER)
    features = Features.of_model(folder, buckets=64)
    weights = stage.tensors()["model.embed_tokens.weight"].detach()[: TOKENIZER.vocab_size].double()
    unit = 6 * weights.square().mean().sqrt() / 127
    assert (features.width, features.vocabulary) == (8, 258)
    inside = weights.abs() < 126 * unit
    assert float((features.table.double() * unit - weights)[inside].abs().max()) <= float(unit) / 2 + 1e-12
    assert features.id == Features.of_model(folder, buckets=64).id


def test_embeddings_that_cannot_be_used_are_refused(tmp_path):
    folder, stage = model(tmp_path, tokens=100)
    save_folder(folder, stage.config, stage.tensors(), TOKENIZER)
    with pytest.raises(TalkootError, match="embeddings cannot be used") as caught:
        Features.of_model(folder)
    assert "100 embeddings of 258 tokens" in caught.value.why
    folder, stage = model(tmp_path / "other")
    with torch.no_grad():
        stage.tensors()["model.embed_tokens.weight"][7, 0] = float("nan")
    save_folder(folder, stage.config, stage.tensors(), TOKENIZER)
    with pytest.raises(TalkootError, match="embeddings cannot be used") as caught:
        Features.of_model(folder)
    assert "NaN" in caught.value.why


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 3, 7]))
def test_shuffled_peers_make_the_router_of_one_bit_for_bit(seed, peers):
    features = Features.random(TOKENIZER, 24, buckets=1 << 10)
    chance = random.Random(seed)
    whole, together = {}, {}
    for name in WORDS:
        texts = documents(name, seed, number=9)
        whole[name] = count(name, texts, features, Key.derived("one"))
        chance.shuffle(texts)
        parts = [count(name, texts[peer::peers], features, Key.derived(peer)) for peer in range(peers)]
        chance.shuffle(parts)
        together[name] = merge(parts)
    for rule in rules:
        first, second = Router.fit(whole, features, rule), Router.fit(together, features, rule)
        assert first.version == second.version
        prompt = TOKENIZER.encode("the salt of the sea and an oak")
        assert first.route(prompt) == second.route(prompt)


def bigram_by_hand(statistics: dict[str, Statistics], features: Features, ids: Sequence[int]) -> list[float]:
    result = []
    for one in statistics.values():
        unigrams = one.histogram.unigrams.tolist()
        bigrams = one.histogram.bigrams.tolist()
        total = sum(unigrams) + 0.5 * len(unigrams)
        chance = lambda token, counts=unigrams, all=total: (counts[token] + 0.5) / all  # noqa: E731
        value = torch.tensor(chance(ids[0]), dtype=torch.float64).log()
        for a, b in pairwise(ids):
            pairs = bigrams[int(pair_buckets(torch.tensor([a, b]), features.buckets))]
            value += torch.tensor((pairs + 10 * chance(b)) / (unigrams[a] + 10), dtype=torch.float64).log()
        result.append(float(value))
    return result


def test_the_bigram_rule_is_a_smoothed_language_model_of_pairs(statistics, features):
    ids = TOKENIZER.encode("the owl of the harbour")
    scores, familiarity = Router.fit(statistics, features).measure(torch.tensor(ids))
    expected = bigram_by_hand(statistics, features, ids)
    assert scores.tolist() == pytest.approx(expected)
    assert familiarity == pytest.approx(max(expected) / len(ids))


def test_chances_of_the_next_token_add_up_where_no_buckets_collide():
    features = Features(TOKENIZER, None, 1 << 22)
    counted = {name: count(name, documents(name, 0), features, Key.derived(name)) for name in WORDS}
    router = Router.fit(counted, features)
    before = TOKENIZER.encode("oa")
    log = torch.stack([router.measure(torch.tensor([*before, next]))[0] for next in range(TOKENIZER.vocab_size)])
    given = router.measure(torch.tensor(before))[0]
    assert (log - given).exp().sum(0).tolist() == pytest.approx([1, 1, 1], abs=1e-3)  # a document's last token


def test_without_buckets_pairs_are_single_tokens():
    features = Features(TOKENIZER, None, 0)
    counted = {name: count(name, documents(name, 0), features, Key.derived(name)) for name in WORDS}
    ids = torch.tensor(TOKENIZER.encode("bread and butter"))
    bigram, bayes = (Router.fit(counted, features, rule).measure(ids)[0] for rule in ("bigram", "naive-bayes"))
    assert torch.equal(bigram, bayes)


def test_naive_bayes_adds_up_logarithms_of_smoothed_shares(statistics, features):
    ids = TOKENIZER.encode("moss")
    scores = Router.fit(statistics, features, "naive-bayes").measure(torch.tensor(ids))[0]
    for score, one in zip(scores.tolist(), statistics.values(), strict=True):
        counts = one.histogram.unigrams.double() + 0.5
        assert score == pytest.approx(float((counts[ids] / counts.sum()).log().sum()))


def test_the_published_vote_is_ridge_on_all_tokens_and_the_ten_surest(statistics, features):
    counted = collect(statistics, features)
    extended = torch.cat([features.table.double(), torch.ones(TOKENIZER.vocab_size, 1)], dim=1)
    rows = extended.repeat_interleave(counted.unigrams.sum(1), dim=0)
    labels = torch.cat([torch.repeat_interleave(torch.arange(3), counts) for counts in counted.unigrams])
    onehot = torch.nn.functional.one_hot(labels, 3).double()
    weights = torch.linalg.solve(rows.T @ rows + 0.01 * torch.eye(49), rows.T @ onehot)
    scores = extended @ (weights / weights[:-1].norm(dim=0))
    assert torch.allclose(token_scores(counted, published=True), scores, atol=1e-6)
    ids = torch.tensor(TOKENIZER.encode("the gull and the kettle of the harbour"))
    chances = scores.softmax(1)[ids]
    entropy = -(chances * chances.log()).sum(1)
    votes = chances.argmax(1)[entropy.argsort()[:10]]
    measured = Router.fit(statistics, features, "votes").measure(ids)[0]
    assert (measured * 10).tolist() == torch.bincount(votes, minlength=3).tolist()
    everybody = Router.fit(statistics, features, "all").measure(ids)[0]
    assert (everybody * len(ids)).round().tolist() == torch.bincount(chances.argmax(1), minlength=3).tolist()


def test_a_prompt_of_fewer_tokens_than_voters_lets_all_vote(statistics, features):
    ids = torch.tensor(TOKENIZER.encode("gull"))
    few, everybody = (Router.fit(statistics, features, rule).measure(ids)[0] for rule in ("votes", "all"))
    assert torch.equal(few, everybody)


def test_the_chunk_rule_scores_the_mean_chunk(statistics, features):
    from talkoot.blend.solve import ridge

    fit = ridge({name: chunks(one) for name, one in statistics.items()}, balanced=True)
    ids = torch.tensor(documents("sea", 3)[0][:64])
    expected = fit.scores(features.chunk_sums(ids)).mean(0)
    assert torch.allclose(Router.fit(statistics, features, "chunk").measure(ids)[0], expected)


@pytest.mark.parametrize("rule", list(rules))
def test_every_rule_knows_its_domains(rule, statistics, features, held_out):
    router = Router.fit(statistics, features, rule)
    asked = [(name, prompt) for name in WORDS for prompt in draw_prompts(held_out[name], 64, 20, 0)]
    right = sum(router.route(prompt).expert == name for name, prompt in asked)
    assert right >= {"bigram": 58, "chunk": 54, "naive-bayes": 51}.get(rule, 30)  # of 60, a third by chance


@pytest.mark.parametrize("rule", list(rules))
def test_a_domain_added_and_removed_leaves_no_trace(rule, statistics, features):
    two = {name: one for name, one in statistics.items() if name != "forest"}
    before = Router.fit(two, features, rule)
    during = before.adding("forest", statistics["forest"])
    after = during.without("forest")
    assert during.version != before.version == after.version
    assert during.names == ("sea", "kitchen", "forest")
    prompt = TOKENIZER.encode("the fox and the spoon")
    assert before.route(prompt) == after.route(prompt)
    assert torch.equal(before.measure(torch.tensor(prompt))[0], after.measure(torch.tensor(prompt))[0])
    assert during.route(prompt) == Router.fit(statistics, features, rule).route(prompt)


def test_routing_does_not_change_the_router(statistics, features):
    router = Router.fit(statistics, features)
    first = router.route_text("an island")
    for name in WORDS:
        router.route(documents(name, 5)[0])
    assert router.route_text("an island") == first
    assert router.version == Router.fit(statistics, features).version


@pytest.mark.parametrize("rule", ["bigram", "chunk"])
def test_a_file_holds_the_whole_router(tmp_path, rule, statistics, features, held_out):
    router = Router.fit(statistics, features, rule).calibrated(held_out, Wanted(lengths=(16, 64), prompts=20))
    router.save(tmp_path / "r" / "router.safetensors")
    again = Router.load(tmp_path / "r" / "router.safetensors")
    assert again.version == router.version
    assert again.route_text("the storm") == router.route_text("the storm")
    assert again.without("sea").version == router.without("sea").version
    assert again.calibration == router.calibration
    assert again.is_calibrated
    assert not Router.fit(statistics, features, rule).is_calibrated


def test_a_file_without_a_table_too(tmp_path):
    features = Features(TOKENIZER, None, 64)
    counted = {name: count(name, documents(name, 0), features, Key.derived(name)) for name in WORDS}
    Router.fit(counted, features).save(tmp_path / "r")
    assert Router.load(tmp_path / "r").version == Router.fit(counted, features).version


def broken(path: Path, case: str) -> None:
    content = path.read_bytes()
    if case == "truncated":
        path.write_bytes(content[:-4])
    elif case == "other file":
        path.write_bytes(b"hello")
    elif case == "number":
        path.write_bytes(content[:-400] + bytes([content[-400] ^ 1]) + content[-399:])
    elif case == "header":
        path.write_bytes(content.replace(b"vocabulary", b"vokabulary"))
    elif case == "missing":
        path.unlink()


@pytest.mark.parametrize("case", ["truncated", "other file", "number", "header", "missing"])
def test_a_broken_router_file_is_refused(tmp_path, case, statistics, features):
    path = tmp_path / "router.safetensors"
    Router.fit(statistics, features).save(path)
    broken(path, case)
    with pytest.raises(TalkootError, match="the router cannot be read"):
        Router.load(path)


def test_an_empty_prompt_is_nobodys(statistics, features):
    decision = Router.fit(statistics, features).route([])
    assert not decision.known
    assert sum(decision.scores.values()) == pytest.approx(1)


def test_a_prompt_of_no_domain_is_unknown_to_a_calibrated_router(statistics, features, held_out):
    router = Router.fit(statistics, features)
    strange = "QUARTZ 0x7F (J.) VEX: [WALTZ] {NYMPH} 1984/12/31 == JUDGE && FLOCK;"
    assert router.route_text(strange).known
    router = router.calibrated(held_out, Wanted(lengths=(16, 64), prompts=60))
    assert not router.route_text(strange).known
    asked = [router.route(prompt) for name in WORDS for prompt in draw_prompts(held_out[name], 64, 60, 0)]
    assert sum(one.known for one in asked) >= 0.9 * len(asked)


def test_decisions_name_every_expert_and_can_be_sent(statistics, features):
    decision = Router.fit(statistics, features).route_text("ship and sail")
    assert decision.expert == "sea"
    assert set(decision.scores) == set(WORDS)
    assert decision.confidence == decision.scores["sea"] == max(decision.scores.values())
    assert msgspec.json.decode(msgspec.json.encode(decision), type=type(decision)) == decision


def test_ids_of_another_tokenizer_are_refused(statistics, features):
    with pytest.raises(ValueError, match="vocabulary"):
        Router.fit(statistics, features).route([5, 100_000])


def test_bad_sets_of_domains_are_refused(statistics, features):
    with pytest.raises(TalkootError, match="nothing to choose"):
        Router.fit({"sea": statistics["sea"]}, features)
    other = Features.random(TOKENIZER, 48, buckets=1 << 12, seed=9)
    with pytest.raises(TalkootError, match="other features"):
        Router.fit(statistics, other)
    with pytest.raises(TalkootError, match="empty"):
        Router.fit({**statistics, "sea": replace(statistics["sea"], histogram=None)}, features)
    with pytest.raises(TalkootError, match="empty"):
        count("sea", [[], []], features, Key.derived("sea"))
    with pytest.raises(TalkootError, match="no domain 'lake'"):
        Router.fit(statistics, features).without("lake")
    with pytest.raises(TalkootError, match="unknown routing rule"):
        Router.fit(statistics, features, "vote")


def test_statistics_whose_numbers_are_not_their_features_are_refused(statistics, features):
    one = statistics["sea"]
    wide, large = Gram(49), Gram(48)
    wide.add(torch.ones(3, 49))
    large.add(torch.full((3, 48), 40.0))  # a chunk's sums are 32 at most
    many = Gram(48)
    many.add(torch.ones(one.tokens + 1, 48))
    broken = {
        "width 48": {"grams": {CHUNKS: wide}},
        "no Gram": {"grams": {}},
        "add up": {"grams": {CHUNKS: large}},
        "chunks are counted": {"grams": {CHUNKS: many}},
        "buckets": {"histogram": Histogram(TOKENIZER.vocab_size, 8, one.histogram.unigrams)},
        "million": {
            "histogram": Histogram(
                TOKENIZER.vocab_size, 1 << 12, one.histogram.unigrams, one.histogram.bigrams.clone().fill_(1 << 31)
            )
        },
    }
    for message, changes in broken.items():
        with pytest.raises(TalkootError, match="other features") as caught:
            Router.fit({**statistics, "sea": replace(one, **changes)}, features)
        assert message in caught.value.why


@pytest.mark.parametrize("rule", ["votes", "all", "average", "chunk"])
def test_rules_that_need_embeddings_say_so(rule):
    features = Features(TOKENIZER, None, 64)
    counted = {name: count(name, documents(name, 0), features, Key.derived(name)) for name in WORDS}
    with pytest.raises(TalkootError, match="needs embeddings"):
        Router.fit(counted, features, rule)


def test_the_best_rule_on_held_out_prompts_is_chosen(statistics, features, held_out, monkeypatch):
    monkeypatch.setattr(rules, "_entries", dict(rules._entries))  # what is registered here, is forgotten again

    @rules.register("worst")
    def worst(counted: Counted):
        return lambda ids: torch.zeros(3, dtype=torch.float64)

    wanted = Wanted(lengths=(16,), prompts=40)
    router, found = choose(statistics, features, held_out, wanted=wanted, among=("worst", "naive-bayes", "bigram"))
    assert found[router.rule] == max(found.values()) > 0.9
    assert found["worst"] == pytest.approx(1 / 3)
    assert router.calibration.points[0].length == 16
    plain = Features(TOKENIZER, None, 64)
    few = {name: count(name, documents(name, 0), plain, Key.derived(name)) for name in WORDS}
    assert set(choose(few, plain, held_out, wanted=wanted)[1]) == {"bigram", "naive-bayes"}
