"""Checks the head of a request as bytes.

It refuses heads that leave the request's end ambiguous, before a parser sees them.

A proxy in front of this server and the server must agree on where each request ends. Otherwise, the end of one client's
request could be answered as a request of another client. RFC 9112 allows servers to repair several malformed heads;
this server repairs none.
"""

from __future__ import annotations

import re

from hybridmem.chat.server.errors import ApiError

MOST_HEAD_BYTES = 16 << 10
MOST_FIELDS = 100

_END = re.compile(rb"\n\r?\n")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\0")
_VERSION = re.compile(rb" HTTP/(\d\.\d)\Z")
_LENGTH = re.compile(rb"[0-9]{1,18}\Z")


def find_head_end(received: bytearray, n_searched: int) -> int | None:
    """Return the number of bytes in the head at the beginning of `received`. None: the empty line after it is missing.

    Args:
        n_searched: how many bytes were searched before without finding the end.
    """
    found = _END.search(received, max(0, n_searched - 2))
    return None if found is None else found.end()


def check_head(head: bytes) -> None:
    """Refuse a head that leaves the end of its request uncertain. h11 checks all other syntax.

    Raises:
        ApiError: 400, 431 or 505.
    """
    if _BARE.search(head):
        raise _malformed("a line that does not end with CR LF")
    request_line, *fields = head[:-4].split(b"\r\n")
    if len(fields) > MOST_FIELDS:
        raise ApiError(431, f"The request has more than {MOST_FIELDS} header fields.", code="headers_too_large")
    version = _VERSION.search(request_line)
    if version is None:
        raise _malformed("a first line that is none of HTTP")
    if version[1] not in (b"1.0", b"1.1"):
        raise ApiError(505, "This server speaks HTTP/1.1.", code="http_version_not_supported")
    lengths, codings = [], []
    for line in fields:
        if line[:1] in (b" ", b"\t"):
            raise _malformed("a header field that goes on in a second line")
        name, _, value = line.partition(b":")
        if name.rstrip(b" \t") != name:
            raise _malformed("a space before the colon of a header field")
        if name.lower() == b"content-length":
            lengths.append(value.strip(b" \t"))
        elif name.lower() == b"transfer-encoding":
            codings.append(value.strip(b" \t").lower())
    if lengths and codings:
        raise _malformed("both Content-Length and Transfer-Encoding")
    if len(lengths) > 1 or not all(map(_LENGTH.match, lengths)):
        raise _malformed("a Content-Length that is not one number")
    if codings and (codings != [b"chunked"] or version[1] == b"1.0"):
        raise _malformed("a Transfer-Encoding other than 'chunked' of HTTP/1.1")


def _malformed(what: str) -> ApiError:
    return ApiError(400, f"The request has {what}.", code="malformed_http")
