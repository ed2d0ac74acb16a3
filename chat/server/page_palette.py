"""Writes the colours of `memory.views.palette` for the page: `python -m hybridmem.chat.server.page_palette`."""

from __future__ import annotations

from pathlib import Path

from hybridmem.memory.views import shades

PATH = Path(__file__).with_name("page") / "palette.css"


def palette_css() -> str:
    """Return the style sheet that names each concept's colour, in light and in dark schemes."""
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in shades(is_dark=is_dark).items())
        for is_dark in (False, True)
    )
    swatches = " ".join(f".is-{name} {{ background: var(--{name}); }}" for name in shades())
    return (
        "/* Made by `python -m hybridmem.chat.server.page_palette` from memory/views/palette.py; a test compares. */\n"
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"{swatches}\n"
    )


if __name__ == "__main__":
    PATH.write_text(palette_css())
