"""Some fields of OpenAI's API are harmless here. The server accepts them, and its reply says what it left out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import pytest

from hybridmem.chat.server.chat_prompts import encode_messages
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.schema import UNSEEN_IMAGE, ChatRequest, CompletionRequest
from hybridmem.chat.server.sessions.schema import ResponseRequest
from hybridmem.chat.stored.items import as_messages
from hybridmem.memory import FormatError
from tests.chat.servers import MODEL, Answer, Running

NOTED = "Okay, noted."
CAT = [{"role": "user", "content": "My cat is called Zoe."}]
CHAT = {"model": MODEL, "messages": CAT}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def left_out(answer: Answer) -> list[str]:
    """Return the names of what a reply says that it left out."""
    assert answer.status == 200, answer.body
    return [text.partition(":")[0] for text in answer.json["usage"]["hybrid_memory"].get("left_out", [])]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"client_metadata": {"a": "b"}, "metadata": {"a": "b"}, "prompt_cache_retention": "24h"}, []),
        ({"service_tier": "flex", "cache_control": {"type": "ephemeral"}, "store": False}, []),
        ({"prompt_cache_key": "k", "user": "u", "safety_identifier": "s", "request_id": "r"}, []),
        ({"a_parameter_of_tomorrow": None, "functions": None}, []),
        ({"max_tokens": -1, "max_completion_tokens": -1, "seed": -1, "stop": list("BCDFGHJKLQWX")}, []),
        ({"logit_bias": [[5, -1.5], [6, False]]}, []),
        ({"temperature": 1, "top_p": 0}, []),
        ({"store": True}, ["store"]),
        ({"verbosity": "low"}, ["verbosity"]),
        ({"reasoning_effort": "high"}, ["reasoning_effort"]),
        ({"reasoning_effort": "none"}, ["reasoning_effort"]),
        ({"enable_thinking": True}, ["enable_thinking"]),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ["enable_thinking"]),
        # The embedded model's template leaves all tools out, which is the third note.
        ({"tools": [LOOK, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}]}, ["tools"] * 3),
        ({"web_search_options": {"search_context_size": "low"}}, ["web_search_options"]),
    ],
)
def test_what_is_harmless_is_accepted(plain_server: Running, change: dict[str, Any], expected: list[str]) -> None:
    answer = plain_server.chat(**change)
    assert left_out(answer) == expected
    assert answer.json["choices"][0]["message"]["content"] == NOTED


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"client_metadata": {"a": "b"}, "metadata": {"a": "b"}, "reasoning": {"summary": "detailed"}}, []),
        ({"text": {"verbosity": "low", "format": {"type": "text"}}}, ["text.verbosity"]),
        ({"truncation": "auto", "max_tool_calls": 3}, ["truncation", "max_tool_calls"]),
        ({"include": ["web_search_call.action.sources"]}, ["include"]),
        ({"include": ["reasoning.encrypted_content"], "max_output_tokens": -1}, []),
        ({"tools": [FLAT, {"type": "web_search", "external_web_access": False}]}, ["tools", "tools"]),
        ({"reasoning": {"effort": "high"}}, ["reasoning.effort"]),
        ({"input": [*CAT, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, ["input"]),
    ],
)
def test_what_is_harmless_in_a_response(plain_server: Running, change: dict[str, Any], expected: list[str]) -> None:
    body = {"model": MODEL, "input": CAT, "temperature": 0} | change
    answer = plain_server.call("POST", "/v1/responses", body)
    assert left_out(answer) == expected
    assert answer.json["output"][0]["content"][0]["text"] == NOTED


def test_histories_of_other_servers_are_read() -> None:
    function = {"name": "look", "arguments": "{}"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}],
         "reasoning_details": [{"type": "reasoning.text", "text": "t"}], "refusal": None, "annotations": [{}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": "msg_1", "status": "completed"},
    ]  # fmt: skip
    read = ChatRequest.read(CHAT | {"messages": messages}).messages
    assert [message.content for message in read] == ["a", "", UNSEEN_IMAGE, "", "no"]
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
        {"type": "local_shell_call", "call_id": "d", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "call_id": "d", "output": "a.txt"},
        {"type": "message", "role": "assistant", "content": None, "metadata": {"turn": 1}},
    ]
    told = as_messages(ResponseRequest.read({"model": MODEL, "input": items}).input)
    calls = [call["function"] for message in told for call in message.get("tool_calls", ())]
    assert calls == [
        {"name": "patch", "arguments": {"input": "+a"}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
    ]
    assert [message["content"] for message in told] == ["", UNSEEN_IMAGE, "", "a.txt", ""]


def test_the_likeliest_token_alone_is_drawn_with_a_share_of_0() -> None:
    for request in (
        ChatRequest.read(CHAT | {"top_p": 0}),
        CompletionRequest.read({"model": "m", "prompt": "a", "top_p": 0}),
    ):
        assert request.sampling(0).top_p == pytest.approx(0, abs=1e-6) and request.sampling(0).top_p


@pytest.mark.parametrize(
    ("template", "options", "noted"),
    [
        ("enable_thinking", {"enable_thinking": False}, []),
        ("reasoning_effort", {"reasoning_effort": "none"}, []),
        ("enable_thinking reasoning_effort", {"enable_thinking": False, "reasoning_effort": "none"}, []),
        ("", {}, ["reasoning_effort: this model's chat template has no such option"]),
    ],
)
def test_no_effort_switches_thoughts_off(template: str, options: dict[str, Any], noted: list[str]) -> None:
    asked = ChatRequest.read(CHAT | {"reasoning_effort": "none"})
    assert asked.told_options(template) == options and asked.left_out_of(template) == noted


@pytest.mark.parametrize("tools", [[{"type": "web_search"}], [LOOK, {"type": "web_search"}]])
@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "web_search_preview"}])
def test_a_tool_of_another_server_cannot_be_required(tools: list[Any], choice: dict[str, str]) -> None:
    with pytest.raises(ApiError, match="web_search"):
        ChatRequest.read(CHAT | {"tools": tools, "tool_choice": choice})


def test_tools_of_a_namespace_are_called_and_read_by_their_own_names(plain_server: Running) -> None:
    tools = [{"type": "namespace", "name": "mcp_eye", "description": "d", "tools": [FLAT | {"strict": False}]}]
    body = {"model": MODEL, "input": CAT, "tools": tools, "tool_choice": "required", "temperature": 0}
    (call, *_) = plain_server.call("POST", "/v1/responses", body).json["output"]
    assert (call["namespace"], call["name"]) == ("mcp_eye", "look")
    told = as_messages(ResponseRequest.read(body | {"input": [call]}).input)
    assert told[0]["tool_calls"][0]["function"]["name"] == "mcp_eye__look"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    asked = ResponseRequest.read({"model": MODEL, "input": "a", "tools": [FLAT], "tool_choice": allowed})
    assert [tool.name for tool in asked.callable_tools()] == ["look"]


# The tests below are about orders of roles.


class Strict:
    """Is a tokenizer whose template refuses what many templates refuse. Its tokens spell the text."""

    chat_template = "a template"
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    unk_token_id = None

    def __init__(self, *, knows_systems: bool, drops_systems: bool = False) -> None:
        self.knows_systems, self.drops_systems = knows_systems, drops_systems

    def get_vocab(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        roles = [message["role"] for message in messages]
        if "system" in roles[1:] and not self.drops_systems:
            raise ValueError("System message must be at the beginning.")
        if not self.knows_systems and "system" in roles:
            raise ValueError("there is no role 'system'")
        if any(one == other == "user" for one, other in pairwise(roles)):
            raise ValueError("roles must alternate")
        shown = [m for i, m in enumerate(messages) if m["role"] != "system" or i == 0]
        return "".join(f"[{m['role']}]{m['content']}" for m in shown)

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())


def arranged(texts: Strict, *messages: tuple[str, str]) -> str:
    given = [{"role": role, "content": content} for role, content in messages]
    return bytes(encode_messages(texts, given)).decode()


def test_every_message_reaches_a_model_whose_template_knows_few_orders() -> None:
    agent = [("system", "A"), ("system", "B"), ("user", "c"), ("user", "d"), ("system", "E"), ("assistant", "f")]
    told = "[user]c\n\nd\n\n<system>\nE\n</system>[assistant]f"
    assert arranged(Strict(knows_systems=True), *agent) == f"[system]A\n\nB{told}"
    assert arranged(Strict(knows_systems=True, drops_systems=True), *agent) == f"[system]A\n\nB{told}"
    systems = "<system>\nA\n</system>\n\n<system>\nB\n</system>\n\n"
    assert arranged(Strict(knows_systems=False), *agent) == told.replace("[user]", f"[user]{systems}")
    with pytest.raises(FormatError, match="System message must be at the beginning"):
        arranged(Refusing(knows_systems=True), *agent)


class Thinking(Strict):
    """Is a tokenizer whose template opens thoughts before each reply."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return super().apply_chat_template(messages, **options) + "[assistant]<think>\n"

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return bytes(token_ids).decode()


def test_a_reply_that_goes_on_has_done_its_thinking() -> None:
    given = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So", "reasoning_content": "Hm."}]
    thinking = bytes(encode_messages(Thinking(knows_systems=True), given, continues=True)).decode()
    assert thinking == "[user]a[assistant]<think>\nHm.\n</think>\n\nSo"


class Refusing(Strict):
    """Is a tokenizer whose template refuses everything."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        super().apply_chat_template(messages, **options)
        raise ValueError("no")
