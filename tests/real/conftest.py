"""Opens the files that `python -m tests.real.download` fetches.

A test whose file is missing is skipped by name. All tests together take three minutes at most, because models are
loaded once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybridmem.chat.prompts import load_tokenizer
from hybridmem.models import load_model
from hybridmem.models.loading.architectures import LanguageModel
from tests.real.download import FOLDER, GEMMA_3, SMOLLM_2

HOLDER = Path(os.environ.get("HYBRIDMEM_REAL", FOLDER))
"""The folder with the files, of which a machine may have one for all checkouts."""


def of_package(name: str) -> Path:
    """Return the path of a file or folder. Skip the test if it is missing."""
    path = HOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not there; python -m tests.real.download fetches it")
    return path


@dataclass(frozen=True)
class Real:
    """Holds a model that others made, in the bits of its file."""

    path: Path
    model: LanguageModel
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))


@pytest.fixture(scope="session", params=[SMOLLM_2, GEMMA_3])
def real(request: pytest.FixtureRequest) -> Real:
    """Return each model in turn."""
    path = of_package(request.param)
    return Real(path, load_model(path, progress=False), load_tokenizer(path))


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """Return the folder with vocabularies, each with texts (`.inp`) and the ids that llama.cpp gives them (`.out`)."""
    return of_package("vocabularies")


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Return name -> source of the chat templates of many models."""
    return {path.stem: path.read_text() for path in sorted(of_package("templates").glob("*.jinja"))}
