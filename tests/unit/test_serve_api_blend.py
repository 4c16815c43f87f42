"""The served experts with the real router, a mixture and an ensemble."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch

from serve_toys import TEXTS, chat, client_of, write_newcomer, write_routed
from talkoot.blend.changes import remove_expert
from talkoot.blend.ensemble import StageReader, stream
from talkoot.blend.folder import MIXTURE, ROUTER, Blend, Expert
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


@pytest.fixture
def folder(tmp_path):
    return write_routed(tmp_path / "blend", "cat", "dog")


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


def test_experts_come_and_go_and_leave_the_router_as_it_was(folder, tmp_path):
    before, wish = Router.load(folder / ROUTER), write_newcomer(tmp_path, folder)

    async def story(client):
        added = await client.post("/v1/experts", json=wish)
        assert added.status_code == 201, added.text
        assert added.json()["router"] == Router.load(folder / ROUTER).version != before.version
        assert (await told(client, TEXTS["cow"]))["talkoot"]["expert"] == "cow"
        assert Blend.open(folder).names == ("cat", "dog", "cow")
        gone = await client.delete("/v1/experts/cow")
        assert (gone.status_code, gone.json()["router"]) == (200, before.version)
        assert (await client.post(CHAT, json=chat("x", "cow"))).status_code == 404
        assert (await client.delete("/v1/experts/cow")).status_code == 404
        bad = [{"name": "../x", "model": "y"}, {"name": "x", "model": "nowhere"}, {"name": "x"}, {**wish, "q": 1}]
        for body in [*bad, {**wish, "statistics": "nowhere"}]:
            answer = await client.post("/v1/experts", json=body)
            assert answer.status_code == 400, answer.text
        assert Blend.open(folder).names == ("cat", "dog")

    visit(folder, story)
    after = Router.load(folder / ROUTER)
    assert (after.names, after.version) == (before.names, before.version)
    assert after.route_text(TEXTS["cow"]) == before.route_text(TEXTS["cow"])


def test_an_expert_added_from_outside_is_routed_to_at_the_next_request(folder, tmp_path):
    wish = write_newcomer(tmp_path, folder)

    async def story(client):
        assert (await told(client, TEXTS["cow"]))["talkoot"]["expert"] != "cow"
        cow = Expert(name="cow", model=wish["model"], parameters=1, tokenizer="", statistics=wish["statistics"])
        Blend.open(folder).put(cow)
        assert (await told(client, TEXTS["cow"]))["talkoot"]["expert"] == "cow"
        assert Router.load(folder / ROUTER).names == ("cat", "dog")  # whoever adds writes the router, or nobody
        remove_expert(folder, "cow")
        assert (await told(client, TEXTS["cow"]))["talkoot"]["expert"] != "cow"

    visit(folder, story)


def test_statistics_of_other_features_are_refused_and_change_nothing(folder, tmp_path):
    wish, other = write_newcomer(tmp_path, folder), Features(Tokenizer.bytes(), buckets=1 << 10)
    text = Tokenizer.bytes().encode(TEXTS["cow"])
    count("cow", [text], other, Key.derived(1, "cow")).write(tmp_path / "cow.safetensors", Key.derived(1, "cow"))

    async def story(client):
        refused = await client.post("/v1/experts", json=wish)
        assert refused.status_code == 400
        assert "features" in refused.json()["error"]["message"]

    visit(folder, story)
    assert Blend.open(folder).names == ("cat", "dog")


def test_the_last_expert_needs_no_router(folder):
    async def story(client):
        assert (await client.delete("/v1/experts/dog")).json()["router"] is None
        assert (await told(client, TEXTS["dog"]))["talkoot"]["expert"] == "cat"
        assert (await client.delete("/v1/experts/cat")).status_code == 200
        assert (await client.post(CHAT, json=chat("x"))).status_code == 404
        assert (await client.get("/health")).status_code == 503

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
