"""Writes errors in the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

from hybridmem.memory import BatchError, CapacityError

log = logging.getLogger("hybrid_memory.server")

RETRY = {"Retry-After": "1"}
_INTERNAL = "The server made an error; its log says more."
_MOST_MESSAGE = 1000
_MOST_VALUE = 100


def clip(text: str, most: int = _MOST_VALUE) -> str:
    """Shorten a client's text before it is shown again, to at most `most` characters with an ellipsis at the end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


class ApiError(Exception):
    """Ends a request with an error. `param` names the field of the request that is wrong.

    Message and param are clipped, because they may quote long parts of the request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(clip(message, _MOST_MESSAGE))
        self.status = status
        self.param = None if param is None else clip(param)
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


LIMITS = {
    "requests": "The server is answering {n} requests already; try again.",
    "long texts": "{n} requests with more than {n_bytes:,} bytes wait to be read; try again.",
    "listeners": "{n} pages watch the memory already; close one of them.",
    "requests of a key": "This key's {n} requests are being answered already; wait for one of them.",
    "tokens of a key": "This key's {n:,} tokens a minute are used up; try again in {seconds} s.",
    "pins": (
        "{n_bytes:,} bytes are pinned already, and {n_more:,} more are over the {n_most:,} that may be; unpin others."
    ),
}
"""Maps each limit to the text of the error 429 that says that it is reached."""


def too_many(limit: str, *, seconds: int | None = 1, code: str = "rate_limit_exceeded", **numbers: int) -> ApiError:
    """Return the error 429 for a limit of `LIMITS`.

    Args:
        seconds: the time after which the client may try again. None: waiting does not help.
        numbers: the values of the text's fields.
    """
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    return ApiError(429, LIMITS[limit].format(seconds=seconds, **numbers), code=code, headers=headers)


class ContextError(ApiError):
    """Refuses a prompt that does not fit into the context, with the wording that OpenAI's clients look for.

    Args:
        n_prompt: the number of the prompt's tokens, or the least possible number if it was not tokenised.
        limit: the tokens that a prompt and its reply may have together.
        wanted: the tokens of the reply that the request asks for. None: it does not say.
        param: the field that holds the prompt.
        is_counted: whether `n_prompt` is the exact number.
    """

    def __init__(
        self, n_prompt: int, limit: int, *, wanted: int | None = None, param: str | None = None, is_counted: bool = True
    ) -> None:
        what = param or "prompt"
        asked = f"{'' if is_counted else 'at least '}{n_prompt} tokens"
        if wanted is None:
            asked = f"your {what} resulted in {asked}. Please reduce the length of the {what}."
        else:
            asked = (
                f"you requested {n_prompt + wanted} tokens ({n_prompt} in the {what}, {wanted} in the completion). "
                f"Please reduce the length of the {what} or completion."
            )
        code = "context_length_exceeded"
        # LangChain looks for the code in the text of the error, where openai's newest clients write the message alone.
        message = f"This model's maximum context length is {limit} tokens. However, {asked} ({code})"
        super().__init__(400, message, param=param, code=code)
        self.n_prompt, self.limit = n_prompt, limit


class StoppingError(Exception):
    """Ends the generations when the server stops."""


def stopping() -> ApiError:
    return ApiError(503, "The server is starting or stopping; try again.", code="server_unavailable", headers=RETRY)


def as_api_error(error: Exception) -> ApiError:
    """Return an engine's error in the form that a client may see. Errors of the server itself go to the log instead."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StoppingError):
        return stopping()
    if isinstance(error, CapacityError):
        return ApiError(
            503,
            "The memory cannot hold this now; try again, or send a shorter request.",
            code="out_of_memory",
            headers=RETRY,
        )
    if isinstance(error, BatchError):
        return ApiError(400, str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, _INTERNAL, code="internal_error")
