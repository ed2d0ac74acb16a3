"""The house as pictures: its floors from the contract in pyproject.toml, its imports from the source. Both as SVG text.

Colours are the site's own, so a drawing follows its light and its dark scheme.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp
from importlinter.api import read_configuration

PACKAGES = ("cluster", "chat", "models", "memory", "training")
"""From the roof down; `training` stands beside the house."""
_INK, _FAINT = "var(--md-default-fg-color)", "var(--md-default-fg-color--lightest)"
_ACCENT, _WALL = "var(--md-accent-fg-color)", "var(--md-code-bg-color)"
_LETTER = 6.6
"""Width of a letter of 11 pixels in a monospaced font."""


@dataclass(frozen=True)
class House:
    """What may import what.

    Attributes:
        packages: from the roof down; each imports only those below it.
        floors: of `memory`, from the top down: modules of one floor do not import each other.
        imports: (importer, imported) within `memory`, as they stand in the source; a subpackage counts as one module.
    """

    packages: tuple[str, ...]
    floors: tuple[tuple[str, ...], ...]
    imports: frozenset[tuple[str, str]]

    @property
    def modules(self) -> list[str]:
        return [module for floor in self.floors for module in floor]


def read_house(root: Path) -> House:
    """The house as it stands.
    Raises ValueError if its source breaks the contract, or if a module stands on no floor."""
    contracts = read_configuration(str(root / "pyproject.toml"))["contracts_options"]
    layers = {c["containers"][0]: c["layers"] for c in contracts if c["type"] == "layers"}
    floors = tuple(tuple(name.strip() for name in floor.split("|")) for floor in layers["hybridmem.memory"])
    graph = grimp.build_graph("hybridmem", exclude_type_checking_imports=True, cache_dir=None)
    modules = {module.rpartition(".")[2] for module in graph.find_children("hybridmem.memory")}
    for module in modules:
        graph.squash_module(f"hybridmem.memory.{module}")
    imports = {
        (a, b)
        for a in modules
        for b in modules - {a}
        if graph.direct_import_exists(importer=f"hybridmem.memory.{a}", imported=f"hybridmem.memory.{b}")
    }
    house = House(tuple(layers["hybridmem"]), floors, frozenset(imports))
    check_house(house, modules)
    return house


def check_house(house: House, modules: set[str]) -> None:
    """Raise ValueError unless each of the modules of `memory` has a floor, and imports only modules of floors below its
    own.
    """
    if homeless := sorted(modules.symmetric_difference(house.modules)):
        raise ValueError(f"the layers in pyproject.toml and the modules of memory/ differ: {', '.join(homeless)}")
    floor_of = {module: number for number, floor in enumerate(house.floors) for module in floor}
    for importer, imported in sorted(house.imports):
        if floor_of[importer] >= floor_of[imported]:
            raise ValueError(
                f"memory.{importer} imports memory.{imported}, which stands no lower in the layers of pyproject.toml"
            )


def draw_house(house: House) -> str:
    """Floors from the roof down; each module is a link to its sentence."""
    width, height, at = 760, 34, 8
    parts = []
    for package in house.packages[:-1]:
        parts.append(_box(8, at, width - 16, 30, package))
        at += 38
    walls = at
    at += 26
    for floor in house.floors:
        widths = [len(name) * _LETTER + 18 for name in floor]
        x = (width - sum(widths) - 8 * (len(floor) - 1)) / 2
        for name, box_width in zip(floor, widths, strict=True):
            parts.append(_box(x, at, box_width, 26, name, link=f"#memory.{name}"))
            x += box_width + 8
        at += height
    frame = f'<rect x="8" y="{walls}" width="{width - 16}" height="{at - walls}" rx="4" fill="none" stroke="{_INK}"/>'
    name = f'<text x="20" y="{walls + 18}" font-weight="bold">memory</text>'
    return _svg(width, at + 8, "The house: packages, and the floors of memory", [frame, name, *parts])


def draw_imports(house: House) -> str:
    """A row for each module of memory, a column for each that it may import, a dot where it does.
    All dots lie right of the diagonal.
    """
    modules, cell, left, top = house.modules, 16, 150, 136
    number = {module: i for i, module in enumerate(modules)}
    parts = []
    for floor in house.floors:
        start, size = number[floor[0]] * cell, len(floor) * cell
        parts.append(f'<rect x="{left + start}" y="{top + start}" width="{size}" height="{size}" fill="{_FAINT}"/>')
    size = len(modules) * cell
    for module, i in number.items():
        middle = i * cell + cell / 2
        parts.append(f'<text x="{left - 6}" y="{top + middle + 4}" text-anchor="end">{module}</text>')
        parts.append(f'<text transform="translate({left + middle + 4} {top - 6}) rotate(-90)">{module}</text>')
        parts.append(
            f'<line x1="{left}" y1="{top + middle}" x2="{left + size}" y2="{top + middle}" stroke="{_FAINT}"/>'
        )
        parts.append(
            f'<line x1="{left + middle}" y1="{top}" x2="{left + middle}" y2="{top + size}" stroke="{_FAINT}"/>'
        )
    for importer, imported in sorted(house.imports):
        x, y = left + number[imported] * cell + cell / 2, top + number[importer] * cell + cell / 2
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4.5" fill="{_ACCENT}"><title>{importer} imports {imported}</title></circle>'
        )
    return _svg(left + size + 8, top + size + 8, "Which module of memory imports which", parts)


def describe_modules(root: Path, package: str) -> dict[str, str]:
    """What each module of a package says of itself in its first paragraph, by dotted name.
    Modules without any code are left out.

    Raises ValueError: a module that says nothing.
    """
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not text:
            continue
        sentence = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
        if not sentence:
            raise ValueError(
                f"{path} has no docstring; its first paragraph is the module's line in docs/architecture.md"
            )
        found[name] = sentence
    return found


def _box(x: float, y: float, width: float, height: float, name: str, *, link: str = "") -> str:
    middle = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle"'
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    rect = f'<rect {place} rx="4" fill="{_WALL}" stroke="{_INK}" stroke-width="0.6"/>'
    box = f"{rect}<text {middle}>{name}</text>"
    return f'<a href="{link}">{box}</a>' if link else box


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """One line, so that Markdown takes it as it is."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" class="drawing">'
    group = f'<g font-family="monospace" font-size="11" fill="{_INK}">{"".join(parts)}</g>'
    return f"{head}<title>{escape(title)}</title>{group}</svg>"
