"""Options of pytest for `memory.testing`: `pytest --pyargs hybridmem.memory.testing --subject MODULE:FACTORY`.

Every run of pytest imports this where the library is installed, so it imports nothing.
"""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("hybridmem.memory.testing")
    group.addoption(
        "--subject", action="append", default=[], metavar="MODULE:FACTORY",
        help="makes an adapter whose memory is tested; may be repeated; unless given, all kinds of hybrid-memory",
    )  # fmt: skip
    group.addoption(
        "--allow-refused", action="append", default=[], metavar="NAME",
        help="a promise that the memory may refuse, by its whole name; may be repeated",
    )  # fmt: skip
    group.addoption("--subject-seed", type=int, default=0, help="of the first history of each promise (0)")
    group.addoption("--subject-examples", type=int, default=20, help="histories a promise (20)")
