"""What all pictures share: colours that everybody can tell apart, and figures that suit white and dark pages."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from memory.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

INK = "#767676"
"""For text and lines: contrasts 4.5 to 1 with white as with black."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
"""Of Okabe and Ito (2008)."""

FREE = (0.5, 0.5, 0.5, 0.15)
"""Where nothing is: a shade of whatever is behind the picture."""

_DOTS_PER_INCH = 110


def need_matplotlib() -> None:
    """Raise SpecError unless matplotlib is there."""
    if find_spec("matplotlib") is None:
        raise SpecError("plots and pictures need matplotlib; install it with: pip install 'hybrid-memory[notebooks]'")


def new_figure(width_inches: float, height_inches: float, title: str = "") -> Figure:
    """A figure without a background that a notebook shows once, as the value of a cell.
    Raises SpecError without matplotlib.
    """
    need_matplotlib()
    from io import BytesIO

    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:  # pyplot, which shows figures by itself, knows nothing of this one
            png = BytesIO()
            self.savefig(png, format="png", dpi=_DOTS_PER_INCH)
            return png.getvalue()

    figure = Picture(figsize=(width_inches, height_inches), layout="constrained", facecolor="none")
    if title:
        figure.suptitle(literal(title), color=INK, fontsize=11, x=0.01, ha="left")
    return figure


def literal(text: str) -> str:
    """Text as it is: matplotlib would read what stands between dollar signs as a formula."""
    return text.replace("$", r"\$")


def plain(axes: Axes) -> None:
    """No frame, no background, everything written in `INK`."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(INK)
    axes.tick_params(colors=INK, labelcolor=INK, labelsize=8)
    axes.tick_params(axis="y", length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=9)


def entitle(axes: Axes, title: str) -> None:
    """Write what it shows above it."""
    axes.set_title(title, loc="left", color=INK, fontsize=9)


def legend(figure: Figure, handles: list[Artist]) -> None:
    """Below everything."""
    if handles:
        columns = min(4, len(handles))
        figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, fontsize=8, frameon=False, labelcolor=INK
        )


def lighter(colour: str, share: float) -> Colour:
    """A colour, made lighter: 0 leaves it, 1 is white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share


def ink_on(colour: Colour) -> str:
    """Black or white, whichever is easier to read on it."""
    red, green, blue = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"
