"""The served experts with the real router, a mixture and an ensemble."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch

from serve_toys import chat, client_of, write_blend, write_model
from talkoot.blend.ensemble import StageReader, stream
from talkoot.blend.folder import MIXTURE, ROUTER, STATISTICS, Blend, Expert
from talkoot.blend.mixture.assemble import assemble
from talkoot.blend.mixture.store import save_mixture
from talkoot.blend.router import Router
from talkoot.blend.statistics import Features, count
from talkoot.core.keys import Key
from talkoot.model.huggingface import load_model
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.catalogue import Catalogue
from talkoot.serve.api.server import Settings

CHAT = "/v1/chat/completions"
TEXTS = {
    "cat": "the cat purrs and miaows at the mouse in the house ",
    "dog": "a dog barks at all who pass by, and fetches sticks ",
    "cow": "moo moo moo says every cow, moo, moo, and chews on ",
}
FEATURES = Features(Tokenizer.bytes(), buckets=1 << 12)


def statistics(name: str, features: Features = FEATURES):
    return count(name, [features.tokenizer.encode(TEXTS[name] * 9)], features, Key.derived(1, name))


@pytest.fixture
def folder(tmp_path):
    blend = write_blend(tmp_path / "blend", "cat", "dog", router=False)
    router = Router.fit({name: statistics(name) for name in ("cat", "dog")}, FEATURES)
    router.save(blend / ROUTER)
    return blend


def visit(folder, story, settings: Settings = Settings()):
    async def main():
        async with client_of(Catalogue(folder), settings) as client:
            return await story(client)

    return asyncio.run(main())


async def told(client, content, model="auto", **more):
    answer = await client.post(CHAT, json=chat(content, model, temperature=0, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_prompts_are_routed_by_what_was_counted(folder):
    async def story(client):
        for name in ("cat", "dog"):
            said = (await told(client, TEXTS[name]))["talkoot"]
            assert said["expert"] == said["routed_to"] == name
            assert said["router"] == Router.load(folder / ROUTER).version
            assert sum(said["scores"].values()) == pytest.approx(1)
            assert said["confidence"] > 0.9

    visit(folder, story)


def test_an_expert_added_and_removed_leaves_the_router_as_it_was(folder, tmp_path):
    before = Router.load(folder / ROUTER)
    write_model(tmp_path / "cow", 5)
    statistics("cow").write(tmp_path / "cow.safetensors", Key.derived(1, "cow"))

    async def story(client):
        wish = {"name": "cow", "model": str(tmp_path / "cow"), "statistics": str(tmp_path / "cow.safetensors")}
        added = await client.post("/v1/experts", json=wish)
        assert added.status_code == 201, added.text
        assert (await told(client, TEXTS["cow"]))["talkoot"]["expert"] == "cow"
        assert (await client.delete("/v1/experts/cow")).json()["router"] == before.version

    visit(folder, story)
    after = Router.load(folder / ROUTER)
    assert (after.names, after.version) == (before.names, before.version)
    ids = FEATURES.tokenizer.encode(TEXTS["cow"])
    assert after.route(ids) == before.route(ids)


def test_an_expert_added_from_outside_is_routed_to_at_the_next_request(folder, tmp_path):
    write_model(tmp_path / "cow", 5)
    statistics("cow").write(folder / STATISTICS / "cow.safetensors", Key.derived(1, "cow"))

    async def story(client):
        assert (await told(client, TEXTS["cow"]))["talkoot"]["expert"] != "cow"
        file = f"{STATISTICS}/cow.safetensors"
        Blend.open(folder).put(
            Expert(name="cow", model=str(tmp_path / "cow"), parameters=1, tokenizer="", statistics=file)
        )
        assert (await told(client, TEXTS["cow"]))["talkoot"]["expert"] == "cow"
        assert Router.load(folder / ROUTER).names == ("cat", "dog")  # whoever added it writes the router, or nobody

    visit(folder, story)


def test_statistics_of_other_features_are_refused_and_change_nothing(folder, tmp_path):
    write_model(tmp_path / "cow", 5)
    other = Features(Tokenizer.bytes(), buckets=1 << 10)
    statistics("cow", other).write(tmp_path / "cow.safetensors", Key.derived(1, "cow"))

    async def story(client):
        wish = {"name": "cow", "model": str(tmp_path / "cow"), "statistics": str(tmp_path / "cow.safetensors")}
        refused = await client.post("/v1/experts", json=wish)
        assert refused.status_code == 400
        assert "features" in refused.json()["error"]["message"]

    visit(folder, story)
    assert Blend.open(folder).names == ("cat", "dog")


def test_without_its_last_rival_an_expert_needs_no_router(folder, tmp_path):
    statistics("dog").write(folder / STATISTICS / "dog.safetensors", Key.derived(1, "dog"))

    async def story(client):
        assert (await client.delete("/v1/experts/dog")).json()["router"] is None
        assert (await told(client, TEXTS["dog"]))["talkoot"]["expert"] == "cat"
        wish = {"name": "dog", "model": "experts/dog", "statistics": f"{STATISTICS}/dog.safetensors"}
        assert (await client.post("/v1/experts", json=wish)).status_code == 201
        assert (await told(client, TEXTS["dog"]))["talkoot"]["expert"] == "dog"

    visit(folder, story)


def test_an_ensemble_says_what_the_posterior_says(folder):
    prompt = "dog"

    async def story(client):
        said = await told(client, prompt, "ensemble")
        assert said["talkoot"]["mode"] == "ensemble"
        return said["choices"][0]["message"]["content"]

    text = visit(folder, story)
    ids = Tokenizer.bytes().encode(prompt)
    readers = {name: StageReader(load_model(folder / "experts" / name)) for name in ("cat", "dog")}
    assert text == Tokenizer.bytes().decode([one.token for one in stream(readers, ids, 8)])


@pytest.mark.parametrize("gate", ["prompt", "mean"])
def test_a_mixture_is_served_whoever_chooses_its_experts(folder, gate):
    experts = {name: folder / "experts" / name for name in ("cat", "dog")}
    made = assemble(experts, experts["cat"], gate=gate, trunk="mean-frozen")
    with torch.no_grad():
        for number, tensor in enumerate(made.mixture.gate_tensors().values()):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    save_mixture(folder / MIXTURE, made.mixture, Tokenizer.bytes())

    async def story(client):
        names = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
        assert names == ["auto", "cat", "dog", "moe", "ensemble"]
        said = {name: await told(client, TEXTS[name], "moe") for name in ("cat", "dog")}
        for name, body in said.items():
            assert body["talkoot"]["mode"] == "moe"
            assert body["talkoot"]["routed_to"] == (name if gate == "prompt" else None)
        return {name: body["choices"][0]["message"]["content"] for name, body in said.items()}

    texts = visit(folder, story)
    from talkoot.model.generate import generate

    for name, text in texts.items():
        stage = made.mixture.forced(name) if gate == "prompt" else made.mixture
        rows = generate(stage, torch.tensor([Tokenizer.bytes().encode(TEXTS[name])]), 8)
        assert text == Tokenizer.bytes().decode([one.token for one in rows[0]])


def test_a_mixture_without_a_router_says_what_is_missing(folder):
    experts = {name: folder / "experts" / name for name in ("cat", "dog")}
    save_mixture(folder / MIXTURE, assemble(experts, experts["cat"], gate="prompt", trunk="mean-frozen").mixture)
    shutil.copy(experts["cat"] / "tokenizer.json", folder / MIXTURE)
    (folder / ROUTER).unlink()

    async def story(client):
        answer = await client.post(CHAT, json=chat("x", "moe"))
        assert answer.status_code == 503
        assert "router" in answer.json()["error"]["message"]

    visit(folder, story)
