"""Makes figures for white and dark pages, in colours that colour-blind readers can distinguish, too."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from hybridmem.memory.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

INK = "#767676"
"""Grey for text and lines, with a contrast of 4.5 to 1 against white and against black."""

FREE = (0.5, 0.5, 0.5, 0.15)
"""Translucent grey for free bytes, so that it suits any background."""

_DOTS_PER_INCH = 110
_SHADES = (0.0, 0.3, 0.55)


def need_matplotlib() -> None:
    """Raise SpecError unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise SpecError("plots and pictures need matplotlib; install it with: pip install 'hybridmem[notebooks]'")


def new_figure(width_inches: float, height_inches: float, title: str = "") -> Figure:
    """Make a figure without a background, which a notebook shows only once, as the value of a cell.
    Raises SpecError without matplotlib.
    """
    need_matplotlib()
    from io import BytesIO

    from matplotlib.figure import Figure

    class Picture(Figure):
        # The figure does not belong to pyplot, because pyplot would show it a second time.
        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, format="png", dpi=_DOTS_PER_INCH)
            return png.getvalue()

    figure = Picture(figsize=(width_inches, height_inches), layout="constrained", facecolor="none")
    if title:
        figure.suptitle(literal(title), color=INK, fontsize=11, x=0.01, ha="left")
    return figure


def literal(text: str) -> str:
    """Escape dollar signs, because matplotlib would read the text between two of them as a formula."""
    return text.replace("$", r"\$")


def plain(axes: Axes) -> None:
    """Remove frame and background, and draw all text in the color `INK`."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(INK)
    axes.tick_params(colors=INK, labelcolor=INK, labelsize=8)
    axes.tick_params(axis="y", length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=9)


def entitle(axes: Axes, title: str) -> None:
    """Write a title above the axes."""
    axes.set_title(title, loc="left", color=INK, fontsize=9)


def legend(figure: Figure, handles: list[Artist]) -> None:
    """Draw a legend below all axes."""
    if handles:
        columns = min(4, len(handles))
        figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, fontsize=8, frameon=False, labelcolor=INK
        )


def lighter(colour: str, share: float) -> Colour:
    """Return a lighter colour: a share of 0 leaves it unchanged, 1 makes it white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share


def owner_shade(colour: str, owner: int) -> Colour:
    """Return a pool's colour in the shade of one of its sequences. Neighbouring sequences get different shades."""
    return lighter(colour, _SHADES[owner % len(_SHADES)])


def ink_on(colour: Colour) -> str:
    """Return black or white, whichever is easier to read on this colour."""
    red, green, blue = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"
