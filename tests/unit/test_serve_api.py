"""The served experts: what clients may ask, what they are told, who answers, and what happens when somebody cannot."""

from __future__ import annotations

import asyncio
import json

import pytest

from serve_toys import chat, client_of, events, write_blend, write_model
from talkoot.blend.folder import Blend
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.server import Settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_blend(tmp_path_factory.mktemp("pair"), "cat", "dog", general=True)


def visit(folder, story, settings: Settings = Settings(), **options):
    async def main():
        async with client_of(folder, settings, **options) as client:
            return await story(client)

    return asyncio.run(main())


def test_a_prompt_goes_to_the_expert_that_knows_it_and_the_answer_says_so(pair):
    async def story(client):
        for name, other in (("cat", "dog"), ("dog", "cat")):
            answer = await client.post(CHAT, json=chat(f"{name} {name} {other}", temperature=0))
            body = answer.json()
            assert answer.status_code == 200, body
            assert answer.headers["x-talkoot-expert"] == body["talkoot"]["expert"] == name
            assert body["talkoot"]["scores"] == {name: 2.0, other: 1.0}
            assert body["talkoot"]["confidence"] == pytest.approx(2 / 3)
            assert (body["talkoot"]["known"], body["talkoot"]["mode"]) == (True, "expert")
            assert body["talkoot"]["router"] == "names-cat-dog"
            named = await client.post(CHAT, json=chat(f"{name} {name} {other}", name, temperature=0))
            assert named.json()["choices"] == body["choices"]
            assert len(body["choices"][0]["message"]["content"]) > 0
            prompt = len(f"{name} {name} {other}")
            assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8}
            assert body["choices"][0]["finish_reason"] == "length"

    visit(pair, story)


def test_a_stream_says_what_the_whole_answer_says(pair):
    async def story(client):
        wish = chat("dog", seed=5, temperature=0.8, n=2)
        whole = (await client.post(CHAT, json=wish)).json()
        answer = await client.post(CHAT, json={**wish, "stream": True, "stream_options": {"include_usage": True}})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-talkoot-expert"] == "dog"
        *chunks, usage, done = events(answer.text)
        assert done == "[DONE]"
        assert usage["usage"] == whole["usage"]
        assert usage["choices"] == []
        for choice in whole["choices"]:
            mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(one["delta"]["content"] for one in mine) == choice["message"]["content"]
            assert [one["finish_reason"] for one in mine][-1] == "length"
        assert whole["choices"][0]["message"] != whole["choices"][1]["message"]

    visit(pair, story)


def test_a_seed_gives_the_same_answer_again_and_none_another(pair):
    async def story(client):
        async def said(**more):
            answer = await client.post(TEXT, json={"model": "cat", "prompt": "x", "max_tokens": 12, **more})
            return answer.json()["choices"][0]["text"]

        assert await said(seed=1) == await said(seed=1) != await said(seed=2)
        assert await said() != await said()
        assert await said(temperature=0) == await said(temperature=0) == await said(top_p=0)

    visit(pair, story)


def test_an_answer_ends_before_a_stop_sequence(pair):
    async def story(client):
        wish = {"model": "cat", "prompt": "x", "max_tokens": 30, "temperature": 0}
        free = (await client.post(TEXT, json=wish)).json()["choices"][0]["text"]
        stop = free[6:8]
        answer = (await client.post(TEXT, json={**wish, "stop": [stop, "never"]})).json()
        assert answer["choices"][0]["text"] == free[: free.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 30

    visit(pair, story)


def test_log_probabilities_are_those_of_the_tokens(pair):
    async def story(client):
        told = (await client.post(CHAT, json=chat("x", "cat", logprobs=True))).json()["choices"][0]
        tokens = told["logprobs"]["content"]
        assert len(tokens) == 8
        assert all(one["logprob"] <= 0 and one["top_logprobs"] == [] for one in tokens)
        plain = (await client.post(TEXT, json={"model": "cat", "prompt": "x", "logprobs": 1})).json()["choices"][0]
        assert len(plain["logprobs"]["token_logprobs"]) == 16

    visit(pair, story)


BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"n": 99}, "n"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ({"stop": [""]}, "stop"),
    ({"tools": [{}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"frequency_penalty": 1.0}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"model": None}, "model"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[f"{param}-{number}" for number, (_, param) in enumerate(BAD)])
def test_a_bad_body_is_refused_with_the_keys_name(pair, change, param):
    async def story(client):
        answer = await client.post(CHAT, json=chat("x", "cat") | change)
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert param in error["message"]

    visit(pair, story)


def test_what_is_no_request_is_refused_in_the_same_shape(pair):
    async def story(client):
        typed = {"content-type": "application/json"}
        tries = [
            (await client.post(CHAT, content=b"{", headers=typed), 400),
            (await client.post(CHAT, content=b"\xff", headers=typed), 400),
            (await client.post(CHAT, content=b"{}", headers=typed), 400),
            (await client.post(CHAT, content=b"[" * 200_000, headers=typed), 400),
            (await client.post(CHAT, content=b" " * (1 << 20) + b"{}", headers=typed), 413),
            (await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415),
            (await client.get(CHAT), 405),
            (await client.get("/v1/nothing"), 404),
            (await client.post(CHAT, json=chat("x", "horse")), 404),
            (await client.post(CHAT, json=chat("x" * 300, "cat")), 400),
            (await client.get("/v1/models/horse"), 404),
            (await client.get("/v1/models", headers={"host": "evil.example"}), 421),
        ]
        for answer, status in tries:
            assert answer.status_code == status, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert tries[8][0].json()["error"]["code"] == "model_not_found"
        assert tries[9][0].json()["error"]["code"] == "context_length_exceeded"

    visit(pair, story)


def test_odd_but_lawful_wishes_are_served(pair):
    async def story(client):
        for change in (
            {"seed": 2**70},
            {"seed": -1},
            {"max_tokens": 10**30},
            {"temperature": 1e-30},
            {"top_p": 1e-30},
            {"user": "\0" * 99, "metadata": {"a": "b"}, "store": True, "max_completion_tokens": 3},
            {"messages": [{"role": "tool", "content": None}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "\0"}]}
                ]
            },
        ):
            answer = await client.post(CHAT, json=chat("x", "cat", **{"max_tokens": 2} | change))
            assert answer.status_code == 200, (change, answer.text)
        for model in ("cat", "auto"):
            torn = json.dumps(chat("\ud800", model)).encode()
            answer = await client.post(CHAT, content=torn, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text

    visit(pair, story)


def test_unknown_prompts_go_where_the_owner_wants_them(pair):
    async def ask(client):
        return await client.post(CHAT, json=chat("a horse"))

    told = visit(pair, ask).json()["talkoot"]
    assert (told["expert"], told["mode"], told["known"]) == ("general", "general", False)
    told = visit(pair, ask, Settings(unknown="ensemble")).json()["talkoot"]
    assert (told["expert"], told["mode"], told["known"]) == ("ensemble", "ensemble", False)
    refused = visit(pair, ask, Settings(unknown="refuse"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "unknown_domain")


def test_the_last_turn_is_routed_or_the_whole_chat(pair):
    talk = [{"role": "user", "content": "cat cat"}, {"role": "assistant", "content": "?"}]
    talk = [*talk, {"role": "user", "content": "dog"}]

    async def ask(client):
        answer = await client.post(CHAT, json={"model": "auto", "messages": talk, "max_tokens": 1})
        return answer.json()["talkoot"]["expert"]

    assert visit(pair, ask) == "dog"
    assert visit(pair, ask, Settings(scope="chat")) == "cat"


def test_a_conversation_stays_with_its_expert_while_it_is_there(pair, tmp_path):
    async def story(client):
        async def ask(*turns, **more):
            messages = [
                {"role": "user" if n % 2 == 0 else "assistant", "content": turn} for n, turn in enumerate(turns)
            ]
            body = {"model": "auto", "messages": messages, "max_tokens": 1, **more}
            return (await client.post(CHAT, json=body)).json()["talkoot"]

        assert (await ask("cat"))["expert"] == "cat"
        later = await ask("cat", "yes", "dog")
        assert (later["expert"], later["sticky"]) == ("cat", True)
        assert (await ask("cat", "yes", "dog", user="another"))["expert"] == "dog"
        assert (await ask("hm"))["known"] is False
        assert (await ask("hm", "yes", "dog"))["expert"] == "dog"  # what was not known does not stick
        Blend.open(tmp_path).remove("cat")
        assert (await ask("cat", "yes", "dog"))["expert"] == "dog"

    visit(write_blend(tmp_path, "cat", "dog", general=True), story)


def test_models_are_listed_with_what_the_blend_can_do(pair, tmp_path):
    async def names(client):
        return [one["id"] for one in (await client.get("/v1/models")).json()["data"]]

    assert visit(pair, names) == ["auto", "cat", "dog", "general", "ensemble"]
    apart = write_blend(tmp_path / "apart", "cat", "dog", router=False, dog=Tokenizer.characters("abcdefg \n"))
    assert visit(apart, names) == ["cat", "dog"]  # nothing can choose, and they cannot speak together
    assert visit(write_model(tmp_path / "Lone Wolf", 1), names) == ["auto", "lone-wolf"]

    async def ask(client):
        return await client.post(CHAT, json=chat("x"))

    assert visit(apart, ask).status_code == 404
    assert "blend route" in visit(apart, ask).json()["error"]["message"]
    assert visit(tmp_path / "Lone Wolf", ask).json()["talkoot"]["expert"] == "lone-wolf"


def test_a_token_is_needed_where_one_is_set(pair):
    async def story(client):
        for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("GET", "/metrics"), ("POST", "/v1/experts")):
            answer = await client.request(method, path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        bearer = {"authorization": "Bearer sesame"}
        assert (await client.get("/v1/models", headers=bearer)).status_code == 200

    visit(pair, story, token="sesame")


def test_without_a_token_only_this_machine_changes_experts(tmp_path):
    folder = write_blend(tmp_path, "cat", "dog")

    async def story(client):
        for answer in (await client.post("/v1/experts", json={}), await client.delete("/v1/experts/cat")):
            assert answer.status_code == 403
            assert "--token" in answer.json()["error"]["message"]
        assert (await client.post(CHAT, json=chat("cat"))).status_code == 200

    visit(folder, story, client=("192.0.2.7", 5))
    assert Blend.open(folder).names == ("cat", "dog")


def test_changes_from_outside_are_seen_at_the_next_request(tmp_path):
    folder = write_blend(tmp_path, "cat", "dog")

    async def story(client):
        Blend.open(folder).remove("dog")
        answer = (await client.post(CHAT, json=chat("dog"))).json()
        assert answer["talkoot"]["expert"] == "cat"
        assert answer["talkoot"]["router"] == "names-cat"
        (folder / "blend.json").write_text("{")
        answer = await client.post(CHAT, json=chat("cat"))
        assert answer.json()["talkoot"]["expert"] == "cat"  # what was whole is served on
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "problem")
        assert "blend.json" in health.json()["problems"]["folder"]

    visit(folder, story)


def test_an_expert_that_cannot_be_read_is_left_out_and_told(tmp_path):
    folder = write_blend(tmp_path, "cat", "dog")
    (folder / "experts/dog/model.safetensors").unlink()

    async def story(client):
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]][:2] == ["auto", "cat"]
        assert "dog" in (await client.get("/health")).json()["problems"]
        assert (await client.post(CHAT, json=chat("dog"))).json()["talkoot"]["expert"] == "cat"

    visit(folder, story)


def test_a_model_that_cannot_be_loaded_is_stood_in_for(tmp_path):
    folder = write_blend(tmp_path, "cat", "dog")
    config = folder / "experts/dog/config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))

    async def story(client):
        answer = (await client.post(CHAT, json=chat("dog"))).json()
        assert answer["talkoot"]["expert"] == "cat"
        (switch,) = answer["talkoot"]["switched"]
        assert switch == {"from": "dog", "to": "cat", "after_tokens": 0, "went_on_from": "nothing"}
        named = await client.post(CHAT, json=chat("x", "dog"))
        assert named.status_code == 503
        assert named.headers["retry-after"]

    visit(folder, story)


def test_numbers_are_in_prometheus_form(pair):
    async def story(client):
        await client.post(CHAT, json=chat("dog"))
        await client.post(CHAT, json=chat("x", "horse"))
        answer = await client.get("/metrics")
        values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
        at = '{endpoint="/v1/chat/completions",model='
        assert values[f'talkoot_requests_total{at}"auto",status="200"}}'] == "1"
        assert values[f'talkoot_requests_total{at}"",status="404"}}'] == "1"
        assert values["talkoot_completion_tokens_total"] == "8"
        assert values['talkoot_expert_loads_total{expert="dog"}'] == "1"
        assert values['talkoot_router{version="names-cat-dog"}'] == "1"

    visit(pair, story)
