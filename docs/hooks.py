"""What the site's build adds to its pages: texts that stand elsewhere, once, and pictures of the source as it is.

A page asks for one with a comment on a line of its own: `<!-- house -->`, `<!-- imports -->` or `<!-- modules PACKAGE
-->`. The home page is the README; pages of the changelog, the examples, the notebooks and benchmarks/results are those
files. What docs/signatures.py writes into the reference for who reads it in the repository is left out: on the site it
stands in full.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from drawings import PACKAGES, describe_modules, draw_house, draw_imports, read_house
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from signatures import MADE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOTEBOOKS, EXAMPLES = ROOT / "notebooks", ROOT / "examples"
_MARK = re.compile(r"^<!-- (house|imports|modules)(?: (\w+))? -->$", re.MULTILINE)
_TO_RESULTS = re.compile(r"\]\((?:\.\./)+benchmarks/results/([\w.]+)")
"""A link as it works in the repository; on the site these files stand in results/."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every file of results gets a place in the navigation."""
    (measured,) = (section["Measured"] for section in config.nav or [] if "Measured" in section)
    measured += [{path.stem: f"results/{path.name}"} for path in sorted(RESULTS.glob("*.md"))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    readme = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .replace("](docs/", "](")
        .replace("](CHANGELOG.md)", "](changelog.md)")
        .replace("](examples)", "](examples.md)")
    )
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "changelog.md", content=changelog))
    files.append(File.generated(config, "examples.md", content=_list_examples()))
    for path in sorted(path for path in NOTEBOOKS.iterdir() if path.suffix in (".md", ".ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    for path in sorted(path for path in RESULTS.iterdir() if path.suffix in (".md", ".png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)
    markdown = _TO_RESULTS.sub(lambda match: f"]({posixpath.relpath('results/' + match[1], here or '.')}", markdown)
    try:
        return _MARK.sub(lambda match: _MAKERS[match[1]](match[2]), MADE.sub("", markdown))
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def _list_examples() -> str:
    """Return the page of the examples: each file, under the first sentence of its docstring."""
    parts = ["# Examples\n\nFive files of at most 60 lines, which run as they are: `python examples/NAME.py`."]
    for path in sorted(EXAMPLES.glob("*.py")):
        code = path.read_text(encoding="utf-8")
        title = path.stem.replace("_", " ").capitalize()
        parts.append(f'## {title}\n\n```python title="examples/{path.name}"\n{code}```')
    return "\n\n".join(parts) + "\n"


def _list_modules(package: str) -> str:
    if package not in PACKAGES:
        raise ValueError(f"there is no package {package!r}; name one of {', '.join(PACKAGES)}")
    lines = ["| module | what it is |", "|---|---|"]
    for name, sentence in describe_modules(ROOT, package).items():
        shown = name.partition(".")[2] or name
        lines.append(f'| <span id="{name}"></span>`{shown}` | {sentence.replace("|", "&#124;")} |')
    return "\n".join(lines)


_MAKERS: dict[str, Callable[[str], str]] = {
    "house": lambda _: draw_house(read_house(ROOT)),
    "imports": lambda _: draw_imports(read_house(ROOT)),
    "modules": _list_modules,
}
