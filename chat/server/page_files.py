"""Serves the web page.

Its few files are read once. Its content policy keeps browsers from loading or running anything else.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from hybridmem.chat.server.errors import ApiError, clip

FOLDER = Path(__file__).with_name("page")
PREFIX = "/page/"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Browsers may keep the file, but must ask whether it has changed. A new version of the server has other files.
    "Cache-Control": "no-cache",
}


def is_page(path: str) -> bool:
    """Return whether a path belongs to the page.

    The page can be loaded without a key, since it holds no secret. It then asks the user for the key.
    """
    return path == "/" or path.startswith(PREFIX)


@cache
def read_files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the ETag of every file of the page, by name."""
    files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}
    return {name: (content, f'"{hashlib.sha256(content).hexdigest()[:16]}"') for name, content in files.items()}


async def show_page(request: Request) -> Response:
    return _file(request, "index.html")


async def show_file(request: Request) -> Response:
    """Return a file of the page. Raises ApiError 404."""
    return _file(request, request.path_params["name"])


def _file(request: Request, name: str) -> Response:
    if name not in read_files():
        raise ApiError(404, f"There is nothing at GET {clip(request.url.path)}.", code="unknown_url")
    content, tag = read_files()[name]
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])
