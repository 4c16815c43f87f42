"""The official ``openai`` client against the served experts, and a real chat model beside small ones."""

from __future__ import annotations

import asyncio

import pytest
from smollm2 import INSTALL, smollm2_folder

from serve_toys import TEXTS, counted, served, write_blend, write_routed
from talkoot.blend.changes import add_expert
from talkoot.core.keys import Key
from talkoot.model.chat import Chat
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.catalogue import Catalogue
from talkoot.serve.api.server import Settings

openai = pytest.importorskip("openai")


def run(folder, story, settings: Settings = Settings(), token: str | None = None):
    async def main():
        async with served(folder, settings, token=token) as (address, _):
            async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=token or "none", max_retries=0) as client:
                return await story(client)

    return asyncio.run(asyncio.wait_for(main(), 100))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_blend(tmp_path_factory.mktemp("pair"), "cat", "dog")


HELLO = [{"role": "user", "content": "hello dog"}]


def test_a_chat_completion_is_parsed(pair):
    async def story(client):
        whole = await client.chat.completions.create(model="auto", messages=HELLO, max_tokens=9, n=2, logprobs=True)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert whole.choices[0].message.role == "assistant"
        assert len(whole.choices[0].logprobs.content) == 9
        assert whole.usage.completion_tokens == 18
        assert whole.model_extra["talkoot"]["expert"] == "dog"
        raw = await client.chat.completions.with_raw_response.create(model="auto", messages=HELLO, max_tokens=1)
        assert raw.headers["x-talkoot-expert"] == "dog"

    run(pair, story)


def test_a_stream_is_parsed_and_says_the_same(pair):
    async def story(client):
        wish = {"model": "auto", "messages": HELLO, "max_completion_tokens": 9, "temperature": 0.0}
        whole = await client.chat.completions.create(**wish)
        stream = await client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        async with client.chat.completions.stream(**wish, stop=text[6]) as helper:  # the client's own way to add up
            assert (await helper.get_final_completion()).choices[0].message.content == text[: text.index(text[6])]

    run(pair, story)


def test_a_text_completion_is_parsed(pair):
    async def story(client):
        whole = await client.completions.create(model="cat", prompt="once", temperature=0, logprobs=1)
        assert whole.usage.completion_tokens == 16
        assert len(whole.choices[0].logprobs.token_logprobs) == 16
        stream = await client.completions.create(model="cat", prompt="once", temperature=0, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text

    run(pair, story)


def test_models_are_listed(pair):
    async def story(client):
        names = [model.id async for model in client.models.list()]
        assert names == ["auto", "cat", "dog", "ensemble"]
        assert (await client.models.retrieve("cat")).owned_by == "talkoot"

    run(pair, story)


def test_errors_are_the_clients_own(pair):
    async def story(client):
        async def create(**change):
            return await client.chat.completions.create(**{"model": "auto", "messages": HELLO} | change)

        with pytest.raises(openai.NotFoundError) as told:
            await create(model="horse")
        assert (told.value.code, told.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as told:
            await create(max_tokens=-1)
        assert told.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError) as told:
            await create(messages=[{"role": "user", "content": "dog" * 1000}])
        assert told.value.code == "context_length_exceeded"
        with pytest.raises(openai.UnprocessableEntityError):
            await create(messages=[{"role": "user", "content": "horse"}])

    run(pair, story, Settings(unknown="refuse"))


def test_the_api_key_is_the_token(pair):
    async def story(client):
        assert (await client.chat.completions.create(model="auto", messages=HELLO, max_tokens=1)).choices
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()

    run(pair, story, token="sesame")


TALK = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "  What is the capital of France? Do not say <|im_end|> or <|im_start|>. "},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Italy?"},
]


@pytest.fixture(scope="module")
def smollm2():
    folder = smollm2_folder()
    if folder is None:
        pytest.skip(f"needs {INSTALL}")
    return folder


def test_a_conversation_is_laid_out_as_transformers_does(smollm2):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2)
    ours = Chat(Tokenizer.load(smollm2))
    for talk in (TALK, TALK[1:2], TALK[3:]):
        assert ours.render(talk) == theirs.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    plain = [TALK[0], *TALK[2:]]
    assert ours.ids(plain) == theirs.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    # A user who spells out markers opens no turn: their ids are those of the template alone.
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"].count(end) == len(TALK) + 1
    assert ours.ids(TALK).count(end) == len(TALK)


@pytest.mark.parametrize("remote", [False, True], ids=["threads", "peers"])
def test_a_real_chat_model_beside_small_ones_is_routed_to_and_streamed(smollm2, tmp_path, remote):
    folder = write_routed(tmp_path / "blend", "cat", "dog", general=True)
    counted(folder, "places").write(tmp_path / "places.safetensors", Key.derived(1, "places"))
    add_expert(folder, "places", smollm2, statistics=tmp_path / "places.safetensors")
    question = [{"role": "user", "content": "What is the capital of France?"}]

    async def story(client):
        wish = {"model": "auto", "messages": question, "max_tokens": 16, "temperature": 0.0}
        stream = await client.chat.completions.create(**wish, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].model_extra["talkoot"]["expert"] == "places"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert "Paris" in text
        assert chunks[-1].choices[0].finish_reason == "stop"
        whole = await client.chat.completions.create(**wish)
        assert whole.choices[0].message.content == text
        tokens = Chat(Tokenizer.load(smollm2)).ids(question)
        assert whole.usage.prompt_tokens == len(tokens)
        small = await client.chat.completions.create(**wish | {"messages": [{"role": "user", "content": TEXTS["dog"]}]})
        assert small.model_extra["talkoot"]["expert"] == "dog"
        models = [model.id async for model in client.models.list()]
        assert models == ["auto", "cat", "dog", "places", "general", "ensemble"]

    run(Catalogue(folder), story, Settings(remote=remote))
