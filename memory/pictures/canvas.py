"""What all pictures share: colours that everybody can tell apart, and figures that suit white and dark pages."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from memory.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#767676"
"""For text and lines: contrasts 4.5 to 1 with white as with black."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
"""Of Okabe and Ito (2008)."""


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """A figure without a background that a notebook shows once, as the value of a cell. Raises SpecError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise SpecError("pictures need matplotlib; install it with: pip install 'hybrid-memory[notebooks]'")
    from io import BytesIO

    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:  # pyplot, which shows figures by itself, knows nothing of this one
            png = BytesIO()
            self.savefig(png, format="png", dpi=110)
            return png.getvalue()

    figure = Picture(figsize=(width_inches, height_inches), layout="constrained")
    figure.set_facecolor("none")
    return figure


def plain(axes: Axes) -> None:
    """No frame, no background, everything written in `INK`."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(INK)
    axes.tick_params(colors=INK, labelcolor=INK, left=False)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.title.set_color(INK)


def blend(colour: str, towards: float) -> tuple[float, float, float]:
    """A colour, made lighter: 0 leaves it, 1 is white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * towards, green + (1 - green) * towards, blue + (1 - blue) * towards


def ink_on(colour: tuple[float, float, float]) -> str:
    """Black or white, whichever is easier to read on it."""
    red, green, blue = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
