"""OpenAI's own client sees stored responses: from what a prompt continues, and to whom they belong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Running, running

BASE: dict[str, Any] = {"model": MODEL, "temperature": 0}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OPEN_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if reasoning_effort == 'low' %}brief{% endif %}{% endif %}"
)
"""Writes tools and calls as they are, and knows an option."""


@pytest.fixture
def client(server: Running, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """Return a client. Each test is another user."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=request.node.name, max_retries=0) as client:
        yield client


def test_a_reply_continues_from_any_earlier_one_at_the_cost_of_its_own_tokens(client: openai.OpenAI) -> None:
    told = client.responses.create(input="My cat is called Zoe.", **BASE)
    for again in range(2):
        asked = client.responses.create(input="What is my cat called?", previous_response_id=told.id, **BASE)
        assert asked.output_text == "Your cat is called Zoe." and asked.previous_response_id == told.id
        assert asked.usage is not None and told.usage is not None
        # The token that ended the first reply was chosen and not yet fed, because nothing followed it. All others were
        # fed.
        n_fed = told.usage.total_tokens - 1
        n_cached = asked.usage.input_tokens_details.cached_tokens
        assert n_cached == (asked.usage.input_tokens - 1 if again else n_fed)
    edited = client.responses.create(input="My cat is called Luna.", previous_response_id=told.id, **BASE)
    asked = client.responses.create(input="What is my cat called?", previous_response_id=edited.id, **BASE)
    assert asked.output_text == "Your cat is called Luna."


def test_a_stream_brings_openais_events_in_order(client: openai.OpenAI) -> None:
    with client.responses.stream(input="My cat is called Zoe.", max_output_tokens=3, **BASE) as stream:
        events = list(stream)
    final = events[-1].response  # type: ignore[union-attr]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.incomplete_details is not None and final.incomplete_details.reason == "max_output_tokens"
    stored = client.responses.retrieve(final.id)
    assert stored.output_text == final.output_text and stored.status == "incomplete"
    assert stored.usage is not None and stored.usage.output_tokens == 3


def test_a_reply_that_a_stop_string_has_cut_is_continued_as_it_reads(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    told = client.responses.create(input="My cat is called Zoe.", extra_body={"stop": [" noted"]}, **BASE)
    assert told.output_text == "Okay,"
    asked = client.responses.create(input="What is my cat called?", previous_response_id=told.id, **BASE)
    assert asked.output_text == "Your cat is called Zoe." and told.usage is not None and asked.usage is not None
    assert asked.hybrid_memory["history"].startswith("continues from")  # type: ignore[attr-defined]
    ended = client.responses.create(
        input="My cat is called Zoe.", extra_body={"stop_token_ids": tokenizer.encode(" noted")[-1:]}, **BASE
    )
    after = client.responses.create(input="What is my cat called?", previous_response_id=ended.id, **BASE)
    assert (ended.output_text, after.usage.input_tokens) == ("Okay,", asked.usage.input_tokens)  # type: ignore[union-attr]
    # The cut reply has two tokens. Its history goes on with the end of the reply and the next question.
    whole = client.responses.create(input="My cat is called Zoe.", **BASE)
    again = client.responses.create(input="What is my cat called?", previous_response_id=whole.id, **BASE)
    assert again.usage is not None and asked.usage.input_tokens == again.usage.input_tokens - 2


def test_what_is_deleted_or_was_never_stored_is_not_there(client: openai.OpenAI) -> None:
    first = client.responses.create(input="My cat is called Zoe.", **BASE)
    second = client.responses.create(input="What is my cat called?", previous_response_id=first.id, **BASE)
    passing = client.responses.create(input="Hello", previous_response_id=second.id, store=False, **BASE)
    client.responses.delete(first.id)
    for gone in (first.id, passing.id, "resp_0"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(input="Hello", previous_response_id=gone, **BASE)
    # A deleted response stays in the history of those that continue from it, until they are deleted too.
    said = [item.content[0].text for item in client.responses.input_items.list(second.id, order="asc")]  # type: ignore[union-attr]
    assert said == ["My cat is called Zoe.", "Okay, noted.", "What is my cat called?"]
    client.responses.delete(second.id)
    assert client.get("/sessions", cast_to=object)["data"] == []  # type: ignore[index]


@pytest.mark.parametrize("name", ["prompt_cache_key", "safety_identifier"])
def test_nobody_finds_what_others_have_stored(client: openai.OpenAI, name: str) -> None:
    own = client.responses.create(input="My cat is called Zoe.", extra_body={name: "a"}, **BASE)
    mine: dict[str, Any] = {"extra_query": {name: "a"}}
    (session,) = client.get("/sessions", cast_to=object, options={"params": mine["extra_query"]})["data"]  # type: ignore[index]
    for stranger in (client, client.with_options(api_key="other")):
        assert client.get("/sessions", cast_to=object)["data"] == []  # type: ignore[index]
        with pytest.raises(openai.NotFoundError):
            stranger.responses.retrieve(own.id)
        with pytest.raises(openai.NotFoundError):
            stranger.responses.delete(own.id)
        with pytest.raises(openai.NotFoundError):
            stranger.responses.create(input="And?", previous_response_id=own.id, **BASE)
        with pytest.raises(openai.NotFoundError):
            stranger.responses.create(input="And?", conversation=session["id"], **BASE)
        with pytest.raises(openai.NotFoundError):
            stranger.get(f"/sessions/{session['id']}/tree", cast_to=object)
    assert client.responses.retrieve(own.id, **mine).output_text == own.output_text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"background": True}, "background"),
        ({"stop": [""]}, "stop"),
        ({"wings": 2}, "wings"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input"),
        ({"input": [{"type": {}}]}, "input"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_0", "role": "user"}]}, "input"),
        ({"conversation": "conv_0", "previous_response_id": "resp_0"}, "conversation"),
    ],
)
def test_what_it_cannot_do_it_refuses_by_name(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body=BASE | {"input": "Hello"} | options, cast_to=object)
    assert caught.value.param == param


def test_texts_that_are_too_deep_or_too_large_end_nothing(client: openai.OpenAI, server: Running) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a":' + "[" * 3000}
    told: Any = [call, {"type": "function_call_output", "call_id": "a", "output": "b"}]
    assert client.responses.create(input=told, **BASE).status == "completed"
    asked = (
        '{"model": "embedded", "input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"a": 1e999}}]}'
    )
    assert server.call("POST", "/v1/responses", asked.encode()).error["code"] == "invalid_json"
    schema = server.chat(guided_json='{"a":' + "[" * 3000 + "]" * 3000 + "}")
    assert (schema.status, schema.error["param"]) == (400, "guided_json")


def test_what_is_left_open_may_be_written_out(client: openai.OpenAI) -> None:
    reply = client.responses.create(input="Hello", reasoning={"effort": None, "summary": None}, **BASE)
    assert reply.status == "completed"


def test_the_chat_template_gets_its_options(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = OPEN_TEMPLATE
    with running(embedded, own, ServerOptions(default_tokens=4)) as server:

        def ask(**options: Any) -> Any:
            return server.call("POST", "/v1/responses", BASE | {"input": "My cat"} | options)

        plain, brief = ask().json, ask(reasoning={"effort": "low"}).json
        assert brief["usage"]["input_tokens"] == plain["usage"]["input_tokens"] + len(tokenizer.encode("brief"))
        assert {"reasoning_tokens", "accepted_prediction_tokens"} <= brief["usage"]["output_tokens_details"].keys()
        assert brief["reasoning"]["effort"] == "low" and "told_options" not in brief
        again = ask(previous_response_id=brief["id"], chat_template_kwargs={"reasoning_effort": "low"}).json
        assert again["hybrid_memory"]["history"].startswith("continues from")
        other = ask(previous_response_id=brief["id"]).json["hybrid_memory"]["history"]
        assert other == "encoded as a whole: the options of the chat template differ"
        session = brief["hybrid_memory"]["session"]
        beside = server.call("POST", f"/v1/sessions/{session}/regenerate", {"node": brief["id"]}).json
        assert beside["usage"]["input_tokens"] == brief["usage"]["input_tokens"]
        counted = {"messages": [{"role": "user", "content": "My cat"}], "reasoning_effort": "low", "tools": [TOOL]}
        n_told = server.call("POST", "/tokenize", counted).json["count"]
        assert n_told == ask(reasoning={"effort": "low"}, tools=[TOOL]).json["usage"]["input_tokens"]
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": "<|end|>"}'}
        named = ask(tools=[TOOL | {"description": "<|end|>"}], input=[{"role": "user", "content": "a"}, call])
        assert named.status == 200, "the name of a special token is text"
        answer = ask(chat_template_kwargs={"wings": 2})
        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs.wings")


def test_an_input_may_refer_to_stored_items(client: openai.OpenAI, server: Running) -> None:
    told = client.responses.create(input="My cat is called Zoe.", **BASE)
    said = client.responses.input_items.list(told.id).data[0].id, told.output[0].id
    references: Any = [{"type": "item_reference", "id": item_id} for item_id in said]
    question: Any = {"role": "user", "content": "What is my cat called?"}
    asked = client.responses.create(input=[*references, question], **BASE)
    assert asked.output_text == "Your cat is called Zoe."
    items = client.responses.input_items.list(asked.id, order="asc").data
    assert len(items) == 3 and not {item.id for item in items} & set(said)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="stranger", max_retries=0) as stranger,
        pytest.raises(openai.NotFoundError, match="There is no item"),
    ):
        stranger.responses.create(input=[*references, question], **BASE)


def test_a_conversation_grows_by_items_and_replies(client: openai.OpenAI) -> None:
    told = {"role": "user", "content": "My cat is called Zoe."}
    conversation = client.conversations.create(items=[told], metadata={"topic": "cats"})  # type: ignore[list-item]
    noted = client.responses.create(conversation=conversation.id, **BASE)
    added = client.conversations.items.create(
        conversation.id, items=[{"role": "user", "content": [{"type": "input_text", "text": "What is my cat called?"}]}]
    )
    asked = client.responses.create(conversation={"id": conversation.id}, **BASE)
    assert (noted.output_text, asked.output_text) == ("Okay, noted.", "Your cat is called Zoe.")
    assert asked.conversation is not None and asked.conversation.id == conversation.id
    said = [i.content[0].text for i in client.conversations.items.list(conversation.id, order="asc", limit=2)]  # type: ignore[union-attr]
    assert said == [told["content"], "Okay, noted.", "What is my cat called?", "Your cat is called Zoe."]
    item = client.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)  # type: ignore[arg-type]
    assert item == added.data[0]
    # The model no longer reads an item that was deleted from a history.
    first = client.conversations.items.list(conversation.id, order="asc").data[0]
    client.conversations.items.delete(first.id, conversation_id=conversation.id)  # type: ignore[arg-type]
    again = client.responses.create(conversation=conversation.id, input="What is my cat called?", **BASE)
    assert "Zoe" in again.output_text and "no token ids are known" in again.hybrid_memory["history"]  # type: ignore[attr-defined]
    client.conversations.update(conversation.id, metadata={"topic": "pets"})
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "pets"}
    client.conversations.delete(conversation.id)
    for call in (client.conversations.retrieve, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            call(conversation.id)


WEATHER: dict[str, Any] = {
    "type": "function", "name": "get_weather", "description": "Tells the weather.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


class Cat(pydantic.BaseModel):
    name: Literal["Zoe", "Milo"]


def test_calls_of_functions_and_forms_are_items_of_a_reply(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input="My cat is called Zoe.", text_format=Cat, **BASE)
    assert isinstance(parsed.output_parsed, Cat) and client.responses.retrieve(parsed.id).text == parsed.text
    asked = {
        "input": "What is the weather?",
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_output_tokens": 99,
        **BASE,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    (call,), (other,) = whole.output, streamed.output
    assert call.type == other.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo") and call.arguments == other.arguments
    assert "response.function_call_arguments.done" in kinds and "response.output_text.delta" not in kinds
    # The result continues from the token ids of the call, whatever the template would make of it.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    told: Any = {"input": [result], "previous_response_id": whole.id, "max_output_tokens": 4, **BASE}
    after = client.responses.create(tools=[WEATHER], **told)
    assert after.hybrid_memory["history"].startswith("continues from") and after.usage is not None  # type: ignore[attr-defined]
    assert whole.usage is not None
    assert after.usage.input_tokens_details.cached_tokens == whole.usage.total_tokens - 1
    without = client.responses.create(**told)
    assert without.hybrid_memory["history"] == "encoded as a whole: the tools differ"  # type: ignore[attr-defined]
