"""Puts subjects on a CUDA device. `CONFORMANCE=full` takes all of them; each has kernels of its own to compile."""

from __future__ import annotations

import os

import pytest
import torch

from hybridmem.memory.recurrences import FAMILIES
from tests.subjects import SUBJECTS, Subject, make_subject

FEW = (
    *(
        "toy",
        "toy-window",
        "toy replay",
        "toy-sparse",
        "toy-quest",
        "toy-4-bit",
        "toy-float8",
        "toy-h2o",
        "toy-attention-tova-4-bit",
    ),
    *(f"family:{name}" for name in FAMILIES),
    *(
        "family:ssd defer",
        "family:gated_delta defer",
        "family:linear_attention defer",
        "family:short_conv defer",
        "family:mamba1 defer",
    ),
    *("family:rwkv7 defer", "model:bamba defer"),
    *(
        "jamba",
        "model:bamba",
        "model:deepseek-v3",
        "model:gemma2",
        "model:qwen3-next-two-of-four-experts",
        "model:recurrent-gemma",
    ),
)
IN_BFLOAT16 = (
    "toy",
    "toy-window",
    "toy replay",
    "jamba",
    "model:bamba",
    "model:bamba defer",
    "model:deepseek-v3",
)
"""Nothing lossy: two roundings may choose other rows. Nor Qwen3-Next, whose random weights enlarge a rounding of 16
bits beyond the table, on a CPU as well.
"""

CHOICES = [(name, torch.float32) for name in (SUBJECTS if os.environ.get("CONFORMANCE") == "full" else FEW)]
CHOICES += [(name, torch.bfloat16) for name in IN_BFLOAT16]


@pytest.fixture(scope="session", autouse=True)
def sums_in_float32() -> None:
    """Let cuBLAS sum in float32. It divides sums of few bfloat16 rows into parts, and may round these to bfloat16."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@pytest.fixture(scope="session", params=CHOICES, ids=lambda choice: f"{choice[0]}-{choice[1]}".replace("torch.", ""))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Return each model on which the conformance suite runs, on the device."""
    name, dtype = request.param
    return make_subject(name, tmp_path_factory.mktemp("subject"), torch.device("cuda"), dtype)
