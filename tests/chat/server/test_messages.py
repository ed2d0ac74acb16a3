"""In Anthropic's Messages API, each block means the same as in a chat, and its clients can read replies and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.messages.format import MessageFormat
from hybridmem.chat.server.messages.schema import read_chat
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.server.schema import UNSEEN_IMAGE
from hybridmem.chat.tools.families import HERMES, Habits
from hybridmem.chat.tools.reading import ReplyReader
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Answer, Running, running

NOTED = "Okay, noted."
CAT = [{"role": "user", "content": "My cat is called Zoe."}]
TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
}
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 5},
    "hybrid_memory": {"from": "window"},
}


def post(server: Running, body: dict[str, Any], path: str = "/v1/messages", **options: Any) -> Answer:
    return server.call("POST", path, {"model": MODEL, "messages": CAT, "temperature": 0} | body, **options)


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream. The name of each is its type as well."""
    events = list[dict[str, Any]]()
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client builds from a stream."""
    message = dict(events[0]["message"])
    for event in events[1:]:
        kind, content = event["type"], message["content"]
        if kind == "content_block_start":
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert event["index"] == len(content) - 1
            delta = dict(event["delta"])
            changed = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
            name = changed.get(delta["type"], "json")
            content[-1][name] = content[-1].get(name, "") + delta[name if name != "json" else "partial_json"]
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name not in ("id", "usage")} | {"content": content}


# The tests below are about what is read.

BRIEF, REPLY = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Okay."}


def read(body: dict[str, Any]) -> Any:
    return read_chat(json.dumps({"model": MODEL, "messages": CAT} | body).encode())


CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"far": True}}
TOLD_CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "look", "arguments": {"far": True}},
}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param(CAT, CAT, id="text"),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
            [{"role": "user", "content": "a"}],
            id="a block with a mark of caching",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a\n\nb"}],
            id="blocks of a user",
        ),
        pytest.param(
            [{"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Let me look."},
                {"type": "redacted_thinking", "data": "x"}, CALL,
            ]}, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": [
                    {"type": "text", "text": "Too far."}, {"type": "image", "source": {"type": "base64", "data": "x"}},
                ]}, {"type": "text", "text": "And now?"},
            ]}],
            [
                {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [TOLD_CALL]},
                {"role": "tool", "content": f"Too far.\n{UNSEEN_IMAGE}", "tool_call_id": "toolu_1"},
                {"role": "user", "content": "And now?"},
            ],
            id="a call, its result and a question",
        ),
        pytest.param(
            [*CAT, BRIEF, REPLY, CAT[0], BRIEF],
            [BRIEF, *CAT, REPLY, CAT[0], BRIEF],
            id="system messages behind others",
        ),
        pytest.param(
            [{"role": "user", "content": [
                {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
                {"type": "search_result", "title": "R", "source": "s", "content": [{"type": "text", "text": "r"}]},
            ]}],
            [{"role": "user", "content": "T\nd\n\nR\nr"}],
            id="documents as text",
        ),
        pytest.param([{"role": "user", "content": []}], [{"role": "user", "content": ""}], id="nothing"),
    ],
)  # fmt: skip
def test_blocks_become_messages(messages: list[Any], expected: list[Any]) -> None:
    assert [message.as_template_knows() for message in read({"messages": messages}).messages] == expected


def test_fields_mean_the_same_as_in_chats() -> None:
    asked = read({
        "system": [{"type": "text", "text": "x-anthropic-billing-header: v=1;"}, {"type": "text", "text": "a"}],
        "max_tokens": 7, "stop_sequences": ["x", "y"], "top_k": 3, "top_p": 0.5, "temperature": 0.25, "stream": True,
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "service_tier": "auto",
        "output_config": {"effort": "low"}, "context_management": {"edits": [{"type": "clear"}]},
    })  # fmt: skip
    assert [(message.role, message.content) for message in asked.messages[:1]] == [("system", "a")]
    asked_later = read({"system": "a", "messages": [*CAT, BRIEF]})
    assert [message.content for message in asked_later.messages] == ["a\n\nBe brief.", CAT[0]["content"]]
    assert (asked.wanted_tokens, asked.stop, asked.stream, asked.user) == (7, ("x", "y"), True, "u")
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.25, 0.5, 3)
    assert [tool.name for tool in asked.callable_tools()] == ["look"] and not asked.parallel_tool_calls
    assert asked.callable_tools()[0].parameters == TOOL["input_schema"]
    assert asked.told_options("enable_thinking reasoning_effort") == {
        "enable_thinking": False,
        "reasoning_effort": "low",
    }
    assert [text.partition(":")[0] for text in asked.left_out] == ["context_management", "tools"]
    kinds = [read({"tools": [TOOL], "tool_choice": {"type": kind}}).tool_choice for kind in ("auto", "any", "none")]
    assert kinds == ["auto", "required", "none"]
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert read({"output_config": {"format": schema}}).shape == read({"output_format": schema}).shape is not None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, "text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "tool_use"),
        ({"messages": [*CAT, {"role": "assistant", "content": [CALL]}]}, "calls no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"wings": 2}, "wings"),
    ],
)
def test_what_is_no_request_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ApiError, match=word) as raised:
        read(change)
    assert raised.value.status == 400


# The tests below are about what is written.


def write(
    text: str, n_pieces: int, *, reason: str = "stop", is_built: bool = True, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one reply, whole and built from its stream."""
    habits = Habits(HERMES, thinks=True, shows_special=False, template="", special=frozenset())
    form = MessageFormat(MODEL, 12, lambda: ReplyReader(habits, (), HERMES))
    generation = Generation(0, 12, 0.0, text=text, finish_reason=reason, **options)  # type: ignore[arg-type]
    cuts = [len(text) * i // n_pieces for i in range(n_pieces + 1)]
    stream = form.begin()
    for i, (start, end) in enumerate(pairwise(cuts)):
        piece = Piece(0, text[start:end], generation, is_last=i == n_pieces - 1, heard_at=0.0)
        stream += form.add(piece, dict)
    events = events_of(stream + form.end(lambda: USAGE))
    return form.whole([generation], USAGE), built(events) if is_built else {}


@pytest.mark.parametrize("n_pieces", [1, 7, 40])
def test_a_stream_builds_the_whole_message(n_pieces: int) -> None:
    calls = "".join(
        f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'far': far}})}\n</tool_call>\n"
        for far in (True, False)
    )
    whole, streamed = write(f"<think>\nHm.\n</think>\n\nLet me look.{calls}", n_pieces)
    assert without_ids(whole) == without_ids(streamed) and whole["usage"] == streamed["usage"]
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and whole["content"][0]["signature"]
    assert [block["input"] for block in whole["content"][2:]] == [{"far": True}, {"far": False}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert [whole["usage"][name] for name in counts] == [7, 5, 3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reason": "stop"}, ("end_turn", None)),
        ({"reason": "length"}, ("max_tokens", None)),
        ({"reason": "deadline"}, ("max_tokens", None)),
        ({"reason": "stop", "stopped_by": "END"}, ("stop_sequence", "END")),
    ],
)
def test_why_a_message_ended(options: dict[str, Any], expected: tuple[str, str | None]) -> None:
    for message in write("Okay.", 2, **options):
        assert (message["stop_reason"], message["stop_sequence"]) == expected
        assert message["content"] == [{"type": "text", "text": "Okay."}]


def test_a_call_that_was_cut_keeps_its_text() -> None:
    whole, _ = write('<tool_call>\n{"name": "look", "arguments": {"far": ', 1, reason="length", is_built=False)
    assert [block["input"] for block in whole["content"]] == [{"arguments": '{"far": '}]
    assert whole["stop_reason"] == "max_tokens"


# The tests below use HTTP.


def test_a_message_whole_and_streamed(plain_server: Running) -> None:
    answer = post(plain_server, {"max_tokens": 20})
    stream = post(plain_server, {"max_tokens": 20, "stream": True})
    assert answer.status == stream.status == 200 and stream.headers["Content-Type"].startswith("text/event-stream")
    events = events_of(stream.body.decode())
    assert without_ids(answer.json) == without_ids(built(events))
    assert answer.json["content"] == [{"type": "text", "text": NOTED}] and answer.json["stop_reason"] == "end_turn"
    assert [events[0]["type"], *(event["type"] for event in events[-3:])] == [
        "message_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    usage = answer.json["usage"]
    n_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert events[0]["message"]["usage"]["input_tokens"] == n_prompt
    assert post(plain_server, {}, "/v1/messages/count_tokens").json == {"input_tokens": n_prompt}


def test_the_rest_of_a_message_is_written(plain_server: Running) -> None:
    messages = [*CAT, {"role": "assistant", "content": NOTED}, {"role": "user", "content": "What is my cat called?"}]
    begun = [*messages, {"role": "assistant", "content": "Your cat is"}]
    whole = post(plain_server, {"messages": messages}).json["content"][0]["text"]
    rest = post(plain_server, {"messages": begun}).json["content"][0]["text"]
    assert "Zoe" in whole and whole == "Your cat is" + rest


def test_the_rest_of_a_message_keeps_the_space_before_it(plain_server: Running) -> None:
    """Tokenizers of SentencePiece would drop it at the beginning of a text."""
    begun = json.dumps({"model": MODEL, "messages": [*CAT, {"role": "assistant", "content": "Okay,"}]}).encode()
    service, outputs = plain_server.service, []

    async def read_both() -> None:
        for body in (begun, json.dumps({"model": MODEL, "messages": CAT}).encode()):
            read = await service.texts.run(0, lambda texts, body=body: service.read_chat(texts, body, read_chat))
            output, _ = await service.form_of(read[0], is_thinking=read[2])
            outputs.append(output.continues_text)

    asyncio.run(read_both())
    assert outputs == [True, False]


def test_a_loop_with_a_tool(plain_server: Running) -> None:
    asked = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    reply = post(plain_server, asked).json
    (call,) = reply["content"]
    assert reply["stop_reason"] == "tool_use" and isinstance(call["input"]["far"], bool)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "My dog is called Rex."}
    messages = [*CAT, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    messages += [{"role": "assistant", "content": NOTED}, {"role": "user", "content": "What is my dog called?"}]
    reply = post(plain_server, {"tools": [TOOL], "messages": messages}).json
    assert "Rex" in reply["content"][0]["text"] and reply["stop_reason"] == "end_turn"
    assert reply["usage"]["cache_read_input_tokens"] > 0


def error_of(answer: Answer) -> tuple[str, str]:
    """Return what Anthropic's clients read of an error."""
    assert answer.json.keys() == {"type", "error"} and answer.json["type"] == "error"
    assert answer.json["error"].keys() == {"type", "message"} and "Traceback" not in answer.json["error"]["message"]
    return answer.json["error"]["type"], answer.json["error"]["message"]


@pytest.fixture(scope="module")
def keyed(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    options = ServerOptions(api_key="secret", max_tokens=64, max_body_bytes=4096, alias=("claude-*", "gpt-5"))
    with running(embedded, tokenizer, options) as server:
        yield server


def test_errors_are_in_the_form_of_their_path(keyed: Running) -> None:
    kind, message = error_of(post(keyed, {"messages": [{"role": "user", "content": "cat " * 200}]}))
    assert kind == "invalid_request_error" and message.startswith("prompt is too long: ")
    assert message.endswith(" tokens > 64 maximum")
    assert error_of(post(keyed, {}, headers={"Authorization": ""}))[0] == "authentication_error"
    assert error_of(post(keyed, {"model": "other"}))[0] == "not_found_error"
    assert error_of(post(keyed, {"messages": [{"role": "user", "content": "cat " * 2000}]}))[0] == "request_too_large"
    assert error_of(keyed.call("POST", "/v1/messages/batches", {}))[0] == "not_found_error"
    assert error_of(keyed.call("GET", "/v1/messages"))[0] == "invalid_request_error"
    assert error_of(post(keyed, {"wings": 2})) == ("invalid_request_error", "Unknown parameter: 'wings'.")
    assert "error" in keyed.call("POST", "/v1/messagesx", {}).error.get("type", "")


def test_a_key_may_come_as_anthropics_clients_send_it(keyed: Running) -> None:
    headers = {"Authorization": "", "x-api-key": "secret"}
    assert post(keyed, {}, headers=headers).status == 200
    wrong = post(keyed, {}, headers=headers | {"x-api-key": "guess"})
    assert wrong.status == 401 and error_of(wrong)[0] == "authentication_error"


def test_a_model_answers_to_its_other_names(keyed: Running) -> None:
    assert post(keyed, {"model": "claude-opus-9"}).json["model"] == "claude-opus-9"
    assert keyed.chat(model="gpt-5").json["model"] == "gpt-5"
    assert keyed.chat(model="gpt-50").error["code"] == "model_not_found"
    for path in ("/v1/models", "/models"):
        assert [model["id"] for model in keyed.call("GET", path).json["data"]] == [MODEL, "gpt-5"]
