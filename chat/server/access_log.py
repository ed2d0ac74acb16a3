"""Writes one line to standard error for each finished request, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import Literal
from uuid import uuid4

from hybridmem.chat.server.errors import clip

Form = Literal["off", "text", "json"]
FORMS: tuple[Form, ...] = ("off", "text", "json")
REQUEST_ID = b"x-request-id"
_POSSIBLE = re.compile(rb"[\x21-\x7e]{1,128}")

log = logging.getLogger("hybrid_memory.access")


def read_request_id(headers: object) -> str:
    """Return the id that a client or a proxy gave a request.

    If there is none, or it cannot be logged, return a new one.
    """
    given = headers.get(REQUEST_ID, b"") if isinstance(headers, dict) else b""
    return given.decode() if _POSSIBLE.fullmatch(given) else f"req_{uuid4().hex}"


def start_log(form: Form) -> None:
    """Write the log to standard error from now on, unless the program has configured it already."""
    if form != "off" and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO)


def write_line(form: Form, about: dict[str, object]) -> None:
    """Write a line with the client, method, path, status, seconds and request_id of a request, and further fields.

    Texts from clients are quoted, so that no path can look like another line.
    """
    if form == "off":
        return
    at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
    known = {name: clip(value) if isinstance(value, str) else value for name, value in about.items()}
    known = {name: value for name, value in known.items() if value is not None}
    if form == "json":
        log.info("%s", json.dumps({"time": at, **known}, separators=(",", ":")))
        return
    log.info("%s %s", at, " ".join(f"{name}={json.dumps(value)}" for name, value in known.items()))
