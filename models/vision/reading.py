"""Reads pictures from bytes that anybody may have sent: bounded in bytes and pixels, in few formats."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridmem.memory.errors import HybridMemoryError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read. Each further decoder of Pillow would be one more that strangers can reach."""


class PictureError(HybridMemoryError, ValueError):
    """A picture cannot be read, or is larger than allowed."""


@dataclass(frozen=True)
class Limits:
    """Bounds what a picture may cost before the model sees it.

    Attributes:
        most_bytes: bytes of a file.
        most_pixels: pixels of a picture as its header says them: a small file may be a bomb that becomes gigabytes.
    """

    most_bytes: int = 20 << 20
    most_pixels: int = 48_000_000


_LIMITS = Limits()


def open_picture(source: bytes | str | Path | Image, limits: Limits = _LIMITS) -> Image:
    """Return a picture in RGB, turned as its camera says. Transparent pixels keep the colour that they hide.

    Raises:
        PictureError: it is none, damaged, animated, or beyond the limits. Its pixels are not decoded before its header
            was compared with the limits.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise PictureError("pictures are read by Pillow; pip install 'hybridmem[pictures]'") from error
    if isinstance(source, Image.Image):
        image: Any = source
        _check_pixels(image, limits)
    else:
        data = _read_bytes(source, limits)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        # Decoders raise errors of many types. For a decompression bomb, Pillow raises an error, or a warning that may
        # have been made an error.
        except Exception as error:
            raise PictureError(f"this is no picture that can be read ({_said(error)}); give {_NAMES}") from error
        _check_pixels(image, limits)
        if getattr(image, "n_frames", 1) > 1:
            raise PictureError(f"this picture has {image.n_frames} frames; give one of them")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise PictureError(f"this picture is damaged: {_said(error)}") from error


def digest_of(image: Image) -> bytes:
    """Return 32 bytes that tell the content of a picture, in RGB, from any other's, whatever file it came from."""
    hasher = hashlib.sha256(f"picture RGB {image.width} {image.height}\n".encode())
    hasher.update(image.tobytes())
    return hasher.digest()


def file_of(source: bytes | str | Path | Image, image: Image) -> bytes:
    """Return a file with a picture: what was given, or for an image of Pillow its pixels as PNG."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str | Path):
        return Path(source).read_bytes()
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def _read_bytes(source: bytes | str | Path, limits: Limits) -> bytes:
    if not isinstance(source, bytes | str | Path):
        raise PictureError(f"{source!r:.80} is no picture; give the bytes or the path of a file, or an image of Pillow")
    try:
        n_bytes = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
        if n_bytes > limits.most_bytes:
            raise PictureError(f"this picture has {n_bytes:,} bytes; at most {limits.most_bytes:,} are read")
        return source if isinstance(source, bytes) else Path(source).read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, PictureError):
            raise
        raise PictureError(f"{source!r:.200} cannot be read: {error}") from error


def _check_pixels(image: Image, limits: Limits) -> None:
    if image.width * image.height > limits.most_pixels:
        raise PictureError(
            f"this picture has {image.width:,} × {image.height:,} pixels; at most {limits.most_pixels:,} are read: "
            "make it smaller"
        )


_NAMES = ", ".join(FORMATS)


def _said(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
