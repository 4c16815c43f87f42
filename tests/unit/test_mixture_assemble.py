"""Putting experts together: what is refused before any tensor is read, trunk policies, coming and going."""

from __future__ import annotations

import pytest
import torch

from mixture_toys import CONTRIBUTOR, NAMES, expert, experts, model, shape, text
from talkoot.blend.mixture.assemble import assemble, with_expert, without_expert
from talkoot.blend.mixture.counting import count, feature_digest
from talkoot.blend.mixture.fitting import fit_gates
from talkoot.blend.statistics import Features, Gram, Statistics, merge
from talkoot.blend.statistics import count as count_tokens
from talkoot.core.errors import TalkootError
from talkoot.core.keys import Key
from talkoot.model.huggingface import save_folder
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer

torch.set_num_threads(1)


def tokens(number=0, rows=2):
    return torch.tensor(text(number, rows, 40, seed=9))


def counted(stage, name, gate="token", number=None, window=16):
    number = NAMES.index(name) if number is None else number
    return count(stage, text(number), domain=name, gate=gate, tokenizer="t", contributor=CONTRIBUTOR, window=window)


def all_counted(made, gate="token"):
    return {name: counted(made.forced(name), name, gate) for name in made.config.experts}


def fitted(gate="token", names=NAMES, **choices):
    made = assemble(experts(names=names), model(), gate=gate, **choices).mixture
    fit_gates(made, all_counted(made, gate))
    return made


def same(one, other, wanted=lambda name: True):
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine if wanted(name))


# -- what is refused --------------------------------------------------------------------------------------------


def save(folder, stage, tokenizer=None):
    save_folder(folder, stage.config, dict(stage.tensors()), tokenizer)
    return folder


@pytest.fixture
def unreadable(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("talkoot.blend.mixture.assemble.read_tensors", refuse)


@pytest.mark.parametrize(
    "other",
    [{"width": 16}, {"layers": 3}, {"family": "qwen2"}, {"norm_eps": 1e-5}, {"vocab_size": 70}, {"kv_heads": 4}],
)
def test_unlike_shapes_are_refused_before_any_tensor_is_read(tmp_path, unreadable, other):
    folders = {"alder": save(tmp_path / "a", model()), "birch": save(tmp_path / "b", model(**other))}
    with pytest.raises(TalkootError, match="unlike shapes") as refused:
        assemble(folders, tmp_path / "a")
    assert next(iter(other)) in refused.value.why


def test_unlike_tokenizers_are_refused_with_their_differences_before_any_tensor_is_read(tmp_path, unreadable):
    folders = {
        "alder": save(tmp_path / "a", model(), Tokenizer.characters("abcxy")),
        "birch": save(tmp_path / "b", model(), Tokenizer.characters("abdxy")),
    }
    with pytest.raises(TalkootError, match="unlike tokenizers") as refused:
        assemble(folders, tmp_path / "a")
    assert refused.value.where == "the seed and birch"
    assert "'c' is only in the first" in refused.value.why
    assert "2 are in one of them only" in refused.value.why


def test_one_expert_is_no_mixture(tmp_path, unreadable):
    with pytest.raises(TalkootError, match="two experts"):
        assemble({"alder": save(tmp_path / "a", model())}, tmp_path / "a")


def test_a_folder_that_lacks_a_tensor_is_refused_before_any_is_read(tmp_path, unreadable):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path / "a", model())
    held = load_file(folder / "model.safetensors")
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(TalkootError, match="lacks tensors"):
        assemble({"alder": folder, "birch": model()}, model())


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_number_that_is_not_finite_is_refused_by_name(name):
    bad = expert(1)
    with torch.no_grad():
        bad.tensors()[name].view(-1)[3] = float("nan")
    with pytest.raises(TalkootError, match="weights cannot be used") as refused:
        assemble({"alder": expert(0), "birch": bad}, model())
    assert refused.value.where == f"birch, tensor {name}"


def test_a_part_of_a_model_is_no_expert():
    with pytest.raises(TalkootError, match="whole dense model"):
        assemble({"alder": expert(0), "birch": Stage(shape(), 0, 2, seed=1)}, model())


def test_folders_and_models_in_memory_give_the_same_mixture(tmp_path):
    dense, tokenizer = experts(tied=True), Tokenizer.characters("abc")
    folders = {name: save(tmp_path / name, stage, tokenizer) for name, stage in dense.items()}
    read = assemble(folders, save(tmp_path / "seed", model(tied=True), tokenizer))
    held = assemble(dense, model(tied=True))
    assert same(read.mixture, held.mixture, lambda name: ".gate." not in name)
    assert read.tokenizer.digest() == tokenizer.digest()
    assert held.tokenizer is None
    assert read.exact


# -- the trunk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trunk", ["pinned", "mean-frozen", "mean-refresh"])
def test_experts_that_trained_feed_forward_layers_only_are_exact_under_every_policy(trunk):
    made = assemble(experts(), model(), trunk=trunk)
    assert made.exact
    assert same(made.mixture.forced("cedar"), expert(2))


def test_experts_that_trained_everything_are_not_exact_and_their_strays_are_named():
    made = assemble(experts("all"), model())
    assert not made.exact
    assert "model.layers.0.self_attn.q_proj.weight" in made.strays["alder"]
    assert not any(".mlp." in name for name in made.strays["alder"])
    assert torch.equal(made.mixture.trunk()["lm_head.weight"], model().tensors()["lm_head.weight"])


def test_a_mean_trunk_is_the_mean_in_double_precision_and_needs_no_seed():
    dense = experts("all")
    made = assemble(dense, trunk="mean-frozen")
    name = "model.layers.1.self_attn.v_proj.weight"
    mean = torch.stack([stage.tensors()[name].double() for stage in dense.values()]).mean(0).float()
    torch.testing.assert_close(made.mixture.tensors()[name], mean, atol=1e-8, rtol=1e-6)
    with pytest.raises(TalkootError, match="needs the seed"):
        assemble(dense)


@torch.no_grad()
def test_unequal_widths_stay_exact():
    dense = {"alder": expert(0, hidden=48), "birch": expert(1, hidden=16), "cedar": expert(2, hidden=32)}
    made = assemble(dense, model()).mixture
    assert made.config.widths == (48, 16, 32)
    for name, stage in dense.items():
        assert torch.equal(made.forced(name)(tokens()), stage(tokens()))
    fit_gates(made, all_counted(made))
    assert made(tokens()).isfinite().all()


# -- counting ---------------------------------------------------------------------------------------------------


def states(stage, rows):
    """Inputs of the feed-forward layers, block by block, computed apart from the code under test."""
    found = []
    for block in stage.layers[1:-1]:
        block.mlp.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].double()))
    with torch.no_grad():
        stage(rows)
    return found


@pytest.mark.parametrize("gate", ["token", "mean"])
def test_the_sums_are_those_of_the_states_that_the_gate_will_see(gate):
    documents = text(1, 3, 16)
    part = count(expert(1), documents, domain="b", gate=gate, tokenizer="t", contributor=CONTRIBUTOR, window=16)
    for index, x in enumerate(states(expert(1), torch.tensor(documents)), 1):
        if gate == "mean":
            x = x.cumsum(1) / torch.arange(1, 17)[None, :, None]
        wide = torch.cat([x, torch.ones(*x.shape[:2], 1)], -1).flatten(0, 1).double()
        torch.testing.assert_close(part.grams[f"block.{index}"].matrix, wide.T @ wide, atol=1e-4, rtol=1e-5)


def test_every_token_counts_once_and_none_is_padding():
    documents = [[], list(range(5)), list(range(40)), [7]]
    part = count(model(), documents, domain="d", gate="token", tokenizer="t", contributor=CONTRIBUTOR, window=16)
    assert (part.documents, part.tokens) == (3, 46)
    assert part.grams["block.2"].count == 46
    seen = []
    stage = model()
    stage.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].tolist()))
    count(stage, documents, domain="d", gate="token", tokenizer="t", contributor=CONTRIBUTOR, window=16)
    assert [len(one) for one in seen] == [5, 16, 16, 8, 1]
    assert [token for one in seen for token in one] == [token for ids in documents for token in ids]


@torch.no_grad()
@pytest.mark.parametrize("gate", ["token", "mean", "naive-bayes", "bigram"])
@pytest.mark.parametrize("owners", [3, 7])
def test_what_several_owners_count_apart_adds_up_to_what_one_would_have_counted(gate, owners):
    central, federated = fitted(gate), fitted(gate)
    parts = {}
    for number, name in enumerate(NAMES):
        documents = text(number, 14)
        shares = [documents[owner::owners] for owner in range(owners)]
        asked = {"domain": name, "gate": gate, "tokenizer": "t", "window": 16}
        found = [
            count(expert(number), share, contributor=f"{owner:064x}", **asked) for owner, share in enumerate(shares)
        ]
        whole = count(expert(number), documents, contributor=CONTRIBUTOR, **asked)
        parts[name] = whole, merge(found[::-1])
    fit_gates(central, {name: whole for name, (whole, _) in parts.items()})
    fit_gates(federated, {name: merged for name, (_, merged) in parts.items()})
    for name, (whole, merged) in parts.items():
        assert merged.histogram == whole.histogram
        for block, gram in whole.grams.items():
            torch.testing.assert_close(merged.grams[block].matrix, gram.matrix, atol=0, rtol=1e-12)
        assert (merged.tokens, merged.documents, name) == (whole.tokens, whole.documents, name)
    assert torch.equal(federated(tokens(1, 8)), central(tokens(1, 8)))


def test_an_owner_counts_on_its_own_expert_what_the_mixture_would_have_counted():
    made = assemble(experts(), model()).mixture
    alone, forced = counted(expert(1), "birch"), counted(made.forced("birch"), "birch")
    assert alone.provenance == forced.provenance
    assert alone.grams == forced.grams


def test_statistics_of_another_trunk_are_of_other_features():
    digests = {
        feature_digest(stage, gate, tokenizer)
        for stage in (model(), expert(0, "all"))
        for gate in ("token", "mean")
        for tokenizer in ("t", "u")
    }
    assert len(digests) == 8
    assert feature_digest(model(), "token", "t") == feature_digest(expert(2), "token", "t")


def test_an_empty_domain_and_a_gate_without_statistics_are_refused():
    with pytest.raises(TalkootError, match="empty"):
        count(model(), [[]], domain="d", gate="token", tokenizer="t", contributor=CONTRIBUTOR)
    with pytest.raises(TalkootError, match="needs no statistics"):
        count(model(), [[1]], domain="d", gate="prompt", tokenizer="t", contributor=CONTRIBUTOR)


# -- gates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_is_ridge_regression_of_the_domain_on_the_states(bias):
    made = assemble(experts(), model(), bias=bias).mixture
    parts = all_counted(made)
    fit_gates(made, parts, strength=1e-3)
    grams = [parts[name].grams["block.1"].matrix for name in NAMES]
    total, sides = sum(grams), torch.stack([gram[:, -1] for gram in grams], 1)
    count = total[-1, -1]
    unit = 1e-3 * total.diagonal()[:-1].mean()
    ridge = torch.cat([torch.full((32,), float(unit)), torch.zeros(1)]).double()
    if bias:
        expected = torch.linalg.solve(total + torch.diag(ridge), sides)
        torch.testing.assert_close(made.mixtures[0].gate.bias.double(), expected[-1], atol=1e-5, rtol=1e-4)
    else:
        expected = torch.linalg.solve((total + torch.diag(ridge))[:-1, :-1], sides[:-1])
    torch.testing.assert_close(made.mixtures[0].gate.weight.double(), expected[:32].T, atol=1e-5, rtol=1e-4)
    assert count == sum(parts[name].tokens for name in NAMES)


@torch.no_grad()
@pytest.mark.parametrize("gate", ["token", "mean", "naive-bayes", "bigram"])
def test_fitted_gates_send_most_tokens_of_a_domain_to_its_expert(gate):
    made = fitted(gate)
    for number in range(3):
        with made.watched() as seen:
            made(tokens(number, 6))
        right = [(one.chosen == number).float().mean() for one in seen]
        assert len(right) == 2
        assert min(right) > (0.45 if gate == "token" else 0.75), (gate, number, right)


def test_the_papers_columns_have_norm_one():
    made = assemble(experts(), model(), bias=True).mixture
    parts = all_counted(made)
    fit_gates(made, parts)
    assert (made.mixtures[0].gate.weight.norm(dim=1) - 1).abs().max() > 1e-2
    fit_gates(made, parts, paper=True)
    torch.testing.assert_close(made.mixtures[0].gate.weight.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("gate", ["token", "mean", "naive-bayes", "bigram"])
def test_an_expert_that_came_and_went_leaves_the_gates_of_never_having_been_there(gate):
    made = fitted(gate)
    parts = all_counted(made, gate)
    grown = with_expert(made, "dogwood", expert(3)).mixture
    parts["dogwood"] = counted(grown.forced("dogwood"), "dogwood", gate, number=1)
    fit_gates(grown, parts)
    again = without_expert(grown, "dogwood")
    fit_gates(again, parts)
    assert again.config == made.config
    assert same(again, made)


@torch.no_grad()
def test_adding_an_expert_gives_the_mixture_assembled_with_it_from_the_start():
    made, late = fitted(names=NAMES[:2]), expert(2)
    grown = with_expert(made, "cedar", late)
    assert grown.exact
    fit_gates(grown.mixture, all_counted(grown.mixture))
    whole = fitted()
    assert grown.mixture.config == whole.config
    assert same(grown.mixture, whole)
    middle = without_expert(whole, "birch")
    for name in ("alder", "cedar"):
        assert torch.equal(middle.forced(name)(tokens()), whole.forced(name)(tokens()))


def test_a_mean_that_is_refreshed_refuses_to_change_in_place_and_the_last_two_experts_stay():
    made = assemble(experts(), trunk="mean-refresh").mixture
    for change in (lambda: with_expert(made, "dogwood", expert(3)), lambda: without_expert(made, "alder")):
        with pytest.raises(TalkootError, match="changed in place"):
            change()
    with pytest.raises(TalkootError, match="experts"):
        without_expert(without_expert(fitted(), "alder"), "birch")
    with pytest.raises(TalkootError, match="does not fit"):
        with_expert(fitted(), "dogwood", model(width=16))


def test_gates_are_refused_without_statistics_of_every_expert_or_with_those_of_other_features():
    made = assemble(experts(), model()).mixture
    parts = all_counted(made)
    with pytest.raises(TalkootError, match="cannot be fitted"):
        fit_gates(made, {name: parts[name] for name in NAMES[:2]})
    strange = {**parts, "cedar": counted(expert(2, "all"), "cedar")}
    with pytest.raises(TalkootError, match="cannot be fitted") as refused:
        fit_gates(made, strange)
    assert "unlike features" in refused.value.why
    with pytest.raises(TalkootError, match="cannot be fitted"):
        fit_gates(made, {name: counted(made.forced(name), name, "naive-bayes") for name in NAMES})


def test_a_routed_second_pass_counts_what_the_gates_lead_to():
    made = fitted()
    routed = {name: counted(made, name) for name in NAMES}
    forced = all_counted(made)
    assert routed["alder"].grams["block.1"] == forced["alder"].grams["block.1"]  # no gate comes before it
    assert routed["alder"].grams["block.2"] != forced["alder"].grams["block.2"]
    fit_gates(made, routed)


def test_naive_bayes_knows_the_logarithm_of_every_tokens_chance_in_each_domain():
    made = fitted("naive-bayes")
    table = made.tensors()["model.embed_tokens.gate.chances"]
    torch.testing.assert_close(table.exp().sum(0), torch.ones(3))
    counts = torch.tensor(text(1)).flatten().bincount(minlength=64) + 0.5
    torch.testing.assert_close(table[:, 1], (counts / counts.sum()).log())


@pytest.mark.parametrize("gate", ["mean", "bigram"])
def test_signed_files_of_what_was_counted_give_the_same_gates(tmp_path, gate):
    made, key = assemble(experts(), model(), gate=gate).mixture, Key()
    for number, name in enumerate(NAMES):
        asked = {"domain": name, "gate": gate, "tokenizer": "t", "contributor": key.peer}
        count(made.forced(name), text(number), window=16, **asked).write(tmp_path / name, key)
    read = {n: Statistics.read(tmp_path / n, features=feature_digest(model(), gate, "t")) for n in NAMES}
    fit_gates(made, read)
    assert same(made, fitted(gate))


def test_a_routers_counts_in_more_buckets_serve_the_gate_and_fewer_do_not():
    made, parts = assemble(experts(), model(), gate="bigram").mixture, {}
    for buckets in (1 << 18, 1 << 20, 1 << 10):
        features = Features(Tokenizer.characters("".join(chr(200 + n) for n in range(62))), buckets=buckets)
        parts[buckets] = {name: count_tokens(name, text(n), features, Key()) for n, name in enumerate(NAMES)}
    fit_gates(made, parts[1 << 18])
    before = made.tensors()["model.embed_tokens.gate.pairs"].clone()
    fit_gates(made, parts[1 << 20])
    assert torch.equal(made.tensors()["model.embed_tokens.gate.pairs"], before)
    assert same(made, fitted("bigram"))
    with pytest.raises(TalkootError, match="cannot be fitted"):
        fit_gates(made, parts[1 << 10])


def test_sums_are_in_double_precision():
    gram = counted(expert(0), "alder").grams["block.1"]
    assert isinstance(gram, Gram)
    assert gram.matrix.dtype == torch.float64
