"""A blend that is changed: experts come and go, routers are fitted, experts are fused; from the commands users type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_blend_kit import WORDS, recipe, run, source

from talkoot.blend.changes import Text, add_expert, remove_expert, route, upcycle
from talkoot.blend.folder import Blend
from talkoot.blend.mixture.store import load_mixture
from talkoot.blend.router import Router
from talkoot.blend.statistics import Statistics
from talkoot.blend.train.verify import verify
from talkoot.cli.blend import count as cli_count
from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.model.huggingface import load_model, save_folder
from talkoot.model.sampling import draw
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.models import Source, kinds

ROUTER = "router.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(recipe(), folder)
    route(folder)
    return folder


@pytest.fixture
def blend(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "blend"))


def model(folder: Path, tokenizer: Tokenizer | None = None, **changes: Any) -> Path:
    tokenizer = tokenizer or Tokenizer.bytes()
    sizes = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "hidden": 32, **changes}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, eos_ids=(tokenizer.eos_id or 0,), **sizes)
    stage = Stage(config, 0, config.layer_count, seed=5)
    save_folder(folder, config, stage.tensors(), tokenizer)
    return folder


def test_prompts_go_where_their_words_are_from(blend):
    router = Router.load(blend / ROUTER)
    assert set(router.names) == set(WORDS)
    for name, words in WORDS.items():
        decision = router.route_text(words)
        assert decision.expert == name
        assert decision.scores[name] > 0.5


def test_an_expert_that_came_and_went_leaves_the_router_as_if_it_had_never_been_there(blend, tmp_path):
    before, bytes_before = Router.load(blend / ROUTER), (blend / ROUTER).read_bytes()
    guest = model(tmp_path / "guest")
    text = tmp_path / "colours.jsonl"
    rows = [json.dumps({"text": f"red green blue mauve {i} " * 5}) for i in range(120)]
    text.write_text("\n".join(rows))
    after = add_expert(blend, "colours", guest, text=Text(source=str(text)))
    assert after is not None
    assert after.route_text("mauve blue red").expert == "colours"
    assert Blend.open(blend).names[-1] == "colours"
    remove_expert(blend, "colours")
    again = Router.load(blend / ROUTER)
    assert again.names == before.names
    prompt = torch.randint(0, 200, (64,))
    assert torch.equal(again.measure(prompt)[0], before.measure(prompt)[0])
    assert again.measure(prompt)[1] == before.measure(prompt)[1]
    assert len((blend / ROUTER).read_bytes()) == len(bytes_before)
    assert verify(blend / "log.sqlite") == []


def test_statistics_that_an_owner_counted_elsewhere_do_as_well_as_the_text(blend, tmp_path):
    guest = model(tmp_path / "guest")
    cli_count(
        blend, "guests", text=source("sums"), column="text", megabytes=0, out=tmp_path / "s", key=None, as_json=False
    )
    counted = Statistics.read(tmp_path / "s")
    assert counted.provenance.domain == "guests"
    assert add_expert(blend, "guests", guest, statistics=tmp_path / "s") is not None
    assert "guests" in Router.load(blend / ROUTER).names


def test_an_expert_without_statistics_is_there_and_prompts_are_not_routed_to_it(blend, tmp_path):
    assert add_expert(blend, "silent", model(tmp_path / "guest")) is None
    assert "silent" in Blend.open(blend).names
    assert "silent" not in Router.load(blend / ROUTER).names


def test_fused_experts_are_the_experts_when_forced(blend):
    made = upcycle(blend, tokens=2000, window=32)
    assert made.format == "mixtral"
    assert not any(made.strays.values())
    mixture = load_mixture(blend / "mixture")
    tokens = torch.randint(2, 258, (2, 24))
    for name in WORDS:
        dense = load_model(blend / "experts" / name)
        with torch.no_grad():
            assert float((mixture.forced(name)(tokens) - dense(tokens)).abs().max()) <= 1e-5


def test_a_blend_can_be_made_of_strangers_alone(tmp_path):
    for name in ("birds", "tools"):
        add_expert(tmp_path / "new", name, model(tmp_path / name), text=Text(source=source(name)))
    router, accuracy = route(tmp_path / "new")
    assert router.route_text("heron finch").expert == "birds"
    assert accuracy
    assert verify(tmp_path / "new" / "log.sqlite") == []
    remove_expert(tmp_path / "new", "tools")
    assert not (tmp_path / "new" / ROUTER).exists()  # of one there is nothing to choose


def test_weights_that_are_no_numbers_are_refused(blend, tmp_path):
    bad = model(tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TalkootError, match="weights cannot be used") as caught:
        add_expert(blend, "bad", bad)
    assert "up_proj" in caught.value.where
    assert "bad" not in Blend.open(blend).names


def test_experts_of_unlike_tokenizers_are_not_fused_and_the_error_names_the_tokens(blend, tmp_path):
    add_expert(blend, "other", model(tmp_path / "other", Tokenizer.characters("abcdefgh ")))
    with pytest.raises(TalkootError, match="tokenizer") as caught:
        upcycle(blend, tokens=500, window=32)
    assert "tokens" in caught.value.why


def test_experts_of_unlike_shapes_are_not_fused(blend, tmp_path):
    add_expert(blend, "wide", model(tmp_path / "wide", width=32, head_dim=16))
    with pytest.raises(TalkootError) as caught:
        upcycle(blend, tokens=500, window=32)
    assert "width" in caught.value.why


def test_statistics_of_other_features_are_refused_and_nothing_changes(blend, tmp_path):
    other = tmp_path / "other"
    add_expert(other, "birds", model(tmp_path / "m", Tokenizer.characters("abcdefghijklmnopqrstuvwxyz 0123456789")))
    cli_count(
        other, "birds", text=source("birds"), column="text", megabytes=0, out=tmp_path / "s", key=None, as_json=False
    )
    before = (blend / "blend.json").read_bytes()
    with pytest.raises(TalkootError, match="features"):
        add_expert(blend, "birds2", model(tmp_path / "guest"), statistics=tmp_path / "s")
    assert (blend / "blend.json").read_bytes() == before


def test_a_router_of_one_domain_is_refused(tmp_path):
    add_expert(tmp_path / "one", "birds", model(tmp_path / "m"), text=Text(source=source("birds")))
    with pytest.raises(TalkootError, match="nothing to choose"):
        route(tmp_path / "one")


def test_an_unknown_expert_is_named_with_the_nearest(blend):
    with pytest.raises(TalkootError) as caught:
        remove_expert(blend, "birdz")
    assert "birds" in caught.value.why


def test_a_gate_that_would_have_to_know_the_answer_is_refused(blend):
    with pytest.raises(TalkootError) as caught:
        upcycle(blend, gate="oracle")
    assert "bigram" in caught.value.next


def test_two_domains_of_one_text_are_not_told_apart_by_a_coin(tmp_path):
    for name in ("birds", "fowl"):
        add_expert(tmp_path / "new", name, model(tmp_path / name), text=Text(source=source("birds")))
    with pytest.raises(TalkootError, match="the same text") as caught:
        route(tmp_path / "new")
    assert caught.value.where == "birds and fowl"


def test_statistics_that_were_signed_for_another_domain_are_refused(blend, tmp_path):
    places = {name: blend / "statistics" / f"{name}.safetensors" for name in WORDS}
    shutil.copy(places["sums"], places["birds"])
    with pytest.raises(TalkootError, match="another domain") as caught:
        route(blend)
    assert "'sums'" in caught.value.why
    with pytest.raises(TalkootError, match="another domain"):
        add_expert(blend, "guests", model(tmp_path / "guest"), statistics=places["tools"])


@pytest.mark.parametrize("name", ["general", "auto", "moe", "ensemble", "Öl", "a/b", ""])
def test_names_that_mean_something_when_served_are_refused(blend, tmp_path, name):
    with pytest.raises(TalkootError, match="cannot have this name"):
        add_expert(blend, name, model(tmp_path / "guest"))


def test_a_model_whose_weights_are_no_numbers_is_not_served(tmp_path):
    bad = model(tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TalkootError, match="weights cannot be used") as caught:
        kinds["dense"](Source(name="bad", kind="dense", folders=(str(bad),), stamp="", weights=1, positions=9))
    assert "model.norm.weight" in caught.value.where


def test_a_temperature_near_zero_takes_the_likeliest_token():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for temperature in (0.0, 1e-300, 1e-40, 1e-9):
        drawn = draw(logits, torch.tensor([0.99], dtype=torch.float64), temperature)
        assert int(drawn.ids) == 1
        assert bool(drawn.logp.isfinite().all())
