"""Takes pictures out of requests: data URLs, and files of hosts that the operator has named.

In a request's texts, marks replace the pictures (`chat.special_tokens.marks`), whatever the request's dialect. Then the
model's tower computes the pictures' rows in a thread, and the tokenizer replaces the marks by the pictures' token ids.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.options import ServerOptions
from hybridmem.chat.special_tokens.marks import mark_of, name_of_source
from hybridmem.chat.stored.items import pictures_in
from hybridmem.chat.stored.nodes import Item
from hybridmem.memory import HybridMemoryError
from hybridmem.models.vision.pictures import Picture, Pictures
from hybridmem.models.vision.reading import Limits, PictureError

_LOW_SIDE = 512
"""A picture with the detail "low" is made smaller until neither side is longer."""
_FETCH_SECONDS = 10.0
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Source:
    """Says where a picture comes from, and in how much detail the model is to see it.

    It comes from a data URL, or from the URL of a file on a host.
    """

    url: str = field(repr=False)
    detail: str = "auto"

    @property
    def name(self) -> str:
        """Return 64 hexadecimal digits that identify the picture."""
        return name_of_source(self.url, self.detail)


Sources = dict[str, Source]
_found: ContextVar[Sources | None] = ContextVar("pictures of a request", default=None)


def sees() -> bool:
    """Return whether the request that is being read may contain pictures."""
    return _found.get() is not None


def mark_part(part: dict[str, Any]) -> str:
    """Record a part with a picture for the request that is being read, and return the picture's mark.

    Raises ValueError.
    """
    found = _found.get()
    if found is None:
        raise ValueError(
            "only parts of the type 'text' are supported, such as {'type': 'text', 'text': ...}: this model, or this "
            "endpoint, takes no pictures"
        )
    source = source_of(part)
    found[source.name] = source
    return mark_of(source.name)


def source_of(part: dict[str, Any]) -> Source:
    """Read a part with a picture, in OpenAI's or Anthropic's form. Raises ValueError."""
    url: Any = part.get("image_url")
    detail = part.get("detail")
    if part["type"] == "image":
        url, detail = _url_of(part.get("source")), None
    elif isinstance(url, dict):
        url, detail = url.get("url"), url.get("detail", detail)
    if url is None and part.get("file_id") is not None:
        raise ValueError("files are not kept here: send the picture as 'image_url', a data URL")
    if not isinstance(url, str) or not url:
        raise ValueError("a picture has a string as its URL, such as 'data:image/png;base64,...'")
    if detail not in (None, "auto", "low", "high", "original"):
        raise ValueError(f"the 'detail' of a picture is 'low', 'high' or 'auto'; got {clip(str(detail), 40)!r}")
    return Source(url, "low" if detail == "low" else "auto")


def _url_of(source: object) -> object:
    """Return the URL of Anthropic's source of a picture. Raises ValueError."""
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    if isinstance(source, dict) and kind == "url":
        return source.get("url")
    raise ValueError(f"an image has a 'source' of the type 'base64' or 'url', not {str(kind)[:40]!r}")


def sources_of(items: Iterable[Item]) -> Sources:
    """Return the pictures in items of a session."""
    found = [Source(*where) for item in items for where in pictures_in(item)]
    return {source.name: source for source in found}


@dataclass(frozen=True)
class Seen:
    """Holds the pictures of a request. Their rows are kept as long as this object."""

    sources: Sources = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    reader: Pictures | None = None

    def picture_ids(self, name: str) -> list[int] | None:
        return self.token_ids.get(name)

    def placed(self, token_ids: list[int], id_of: Callable[[str], int | None], n_before: int) -> list[int]:
        """Return a prompt with pictures as the model wants it (`Pictures.placed`)."""
        return token_ids if self.reader is None else self.reader.placed(token_ids, id_of, n_before)


NOTHING = Seen()


class Sight:
    """Reads the pictures of requests for one model.

    Args:
        pictures: reads pictures for the model. None: the model reads text only.
    """

    def __init__(self, pictures: Pictures | None, options: ServerOptions) -> None:
        self._pictures = pictures
        self._most = options.max_pictures
        self._hosts = frozenset(host.lower() for host in options.picture_hosts)
        if pictures is not None:
            pictures.limits = Limits(options.max_picture_bytes, options.max_picture_pixels)

    @contextmanager
    def collecting(self) -> Iterator[Sources]:
        """Collect the pictures of the request that is read inside the block."""
        found = Sources()
        token = _found.set(None if self._pictures is None else found)
        try:
            yield found
        finally:
            _found.reset(token)

    def is_likely(self, body: bytes) -> bool:
        """Return whether a body seems to hold pictures.

        Such a body is read in the thread of long texts, because the tower takes long.
        """
        return self._pictures is not None and (b'"image' in body or b'"input_image' in body)

    def read(self, sources: Sources, texts: Tokenizer, *, param: str) -> Seen:
        """Read the pictures of a request, and compute their rows unless they are known. Raises ApiError 400."""
        if not sources:
            return NOTHING
        if self._pictures is None:
            message = f"Invalid '{param}': it holds pictures, and this model reads text alone."
            raise ApiError(400, message, param=param, code="invalid_value")
        if len(sources) > self._most:
            message = f"Invalid '{param}': it has {len(sources)} pictures; {self._most} are possible."
            raise ApiError(400, message, param=param, code="invalid_value")
        seen = Seen(dict(sources), reader=self._pictures)
        for name, source in sources.items():
            try:
                picture = self._pictures.read(_shrunk(self._bytes_of(source), self._pictures.limits, source.detail))
                seen.pictures[name] = picture
                seen.token_ids[name] = picture.token_ids(texts.convert_tokens_to_ids)
            except HybridMemoryError as error:
                raise ApiError(400, f"Invalid '{param}': {error}.", param=param, code="invalid_image") from None
        return seen

    def _bytes_of(self, source: Source) -> bytes:
        """Return the bytes of a picture. Raises PictureError."""
        scheme = source.url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _decode_data_url(source.url, self._most_bytes)
        if scheme in _PORTS:
            return self._fetch(source.url)
        raise PictureError("a picture is a data URL, such as 'data:image/png;base64,...'")

    @property
    def _most_bytes(self) -> int:
        assert self._pictures is not None
        return self._pictures.limits.most_bytes

    def _fetch(self, url: str) -> bytes:
        """Fetch a picture from a host that the operator has named. It follows no redirections, and uses no proxy."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError as error:
            raise PictureError(f"the URL of a picture cannot be read: {error}") from None
        name = host if port in (None, _PORTS[parts.scheme.lower()]) else f"{host}:{port}"
        if name not in self._hosts or parts.username is not None:
            raise PictureError(
                "this server fetches no pictures from other hosts; send it as a data URL, "
                "'data:image/png;base64,...', or let the operator allow the host by --picture-host"
            )
        kind = HTTPSConnection if parts.scheme.lower() == "https" else HTTPConnection
        connection, deadline = kind(host, port, timeout=_FETCH_SECONDS), time.monotonic() + _FETCH_SECONDS
        data = bytearray()
        try:
            connection.request("GET", urlunsplit(("", "", parts.path or "/", parts.query, "")))
            response = connection.getresponse()
            if response.status != 200:
                raise PictureError(f"{clip(name)} answered {response.status}, which is no picture")
            while piece := response.read1(1 << 16):
                data += piece
                if len(data) > self._most_bytes:
                    raise PictureError(f"this picture has more than {self._most_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise PictureError(f"{clip(name)} took longer than {_FETCH_SECONDS:g} s")
        except (HTTPException, OSError, ValueError) as error:
            if isinstance(error, PictureError):
                raise
            raise PictureError(f"{clip(name)} gave no picture: {type(error).__name__}") from None
        finally:
            connection.close()
        return bytes(data)


def _decode_data_url(url: str, most_bytes: int) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().startswith("data:image/") or not head.lower().endswith(";base64"):
        raise PictureError("a picture's data URL begins with 'data:image/...;base64,'")
    if len(data) // 4 * 3 > most_bytes + 2:
        raise PictureError(f"this picture has more than {most_bytes:,} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"the data of a picture's URL is no base64: {error}") from None


def _shrunk(data: bytes, limits: Limits, detail: str) -> Any:
    """Return a picture, made smaller if the model is to see little detail."""
    if detail != "low":
        return data
    from hybridmem.models.vision.reading import open_picture

    image = open_picture(data, limits)
    image.thumbnail((_LOW_SIDE, _LOW_SIDE))
    return image
