"""Whatever a kernel chooses, it computes the same.

Every value that tuning tries runs on small shapes against the twins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import gpu_attention, gpu_cases, gpu_prompts, gpu_states, gpu_tails
from benchmarks.gpu_attention import Heads
from benchmarks.gpu_cases import Case, Run
from benchmarks.gpu_states import Layer
from benchmarks.gpu_tune import OPTIONS, Trial, neighbours
from benchmarks.harness import Samples
from hybridmem.memory import RecurrentSpec
from hybridmem.memory.kernels import Erase, reference
from hybridmem.memory.kernels.cuda.choices import TUNABLES
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.recurrences import mamba1_spec, rwkv7_spec
from tests.kernels_cuda.on_device import MadeOn, OnDevice
from tests.kernels_cuda.test_states import assert_as_twin, behind_tails, matrix_rows, rows_of
from tests.memory.kernels.test_kernels import Pages, Slots
from tests.memory.kernels.test_page_choice import Bounds
from tests.tolerances import assert_kernel_close

HEADS, LAYERS = Heads("tiny", 2, 1, 16), (Layer("adds", 1, 1, 16, 8, False), Layer("erases", 1, 1, 16, 8, True))


def attention(device: torch.device) -> None:
    pages = Pages(6, 2, 8, 4, lengths=(1, 3, 20), histories=(300, 70, 3))
    assert_kernel_close(pages.attend(OnDevice(device)), pages.attend(reference))


def read_states(device: torch.device) -> None:
    lengths = (2, 1)
    slots = behind_tails((1, 20, 12), ((1, 12), (1, 20), (1,)), (19, 3), lengths, (9, 0))
    q, k, v = matrix_rows(sum(lengths), 1, 1, 20, 12)
    erase = Erase(k, None, after_decay=True)
    assert_as_twin("matrix_scan", q, k, v, -torch.rand(3, 1), erase, slots, device=device, strength_TH=torch.rand(3, 1))


def scan_matrices(device: torch.device, *lengths: int) -> None:
    n = sum(lengths)
    q, k, v = matrix_rows(n, 1, 1, 20, 12)
    slots, erase = Slots((1, 20, 12), lengths).fresh(), Erase(k, None, after_decay=True)
    assert_as_twin("matrix_scan", q, k, v, -torch.rand(n, 1), erase, slots, device=device, strength_TH=torch.rand(n, 1))


def columns(device: torch.device) -> None:
    q, k, v = matrix_rows(17 + 33, 1, 1, 20, 12)
    slots, erase = Slots((1, 20, 12), (17, 33)).fresh(), Erase(k, -torch.rand(50, 1, 1) * k, after_decay=False)
    assert_as_twin("matrix_scan", q, k, v, -torch.rand(50, 1, 12), erase, slots, device=device)


def selective_scan(device: torch.device) -> None:
    x, dt, b, c = rows_of(42, 70, 70, 16, 16)
    a, bias, d = -torch.rand(16, 70), torch.randn(70), torch.randn(70)
    assert_as_twin("selective_scan", x, dt, bias, b, c, a, d, Slots((16, 70), (1, 41)).fresh(), device=device)


def vectors(device: torch.device) -> None:
    x, decay = rows_of(3, 130, 130)
    assert_as_twin("linear_scan", x, decay.sigmoid(), Slots((130,), (1, 2)).fresh(), device=device)
    states = tuple(Slots((130,), (1, 2), initial=initial).fresh() for initial in (0.0, 0.0, -1e38))
    states[1].flat.abs_()
    assert_as_twin("wkv4", x, decay, -torch.rand(130), torch.randn(130), states, device=device)


def convolution(device: torch.device) -> None:
    slots, lengths = Slots((3, 40), (1, 9, 33), initial=0.5).fresh(), 43
    assert_as_twin("causal_conv", torch.randn(lengths, 40), torch.randn(4, 40), torch.randn(40), slots, device=device)


def score_pages(device: torch.device) -> None:
    bounds = Bounds(3, 2, 8)
    assert torch.equal(bounds.chosen(OnDevice(device)), bounds.expected())


COMPUTE: dict[str, Callable[[torch.device], None]] = {
    "attend": attention, "split": attention, "read_states": read_states,
    "scan_tokens": lambda device: scan_matrices(device, 1, 3),
    "scan_chunks": lambda device: scan_matrices(device, 65, 17), "scan_columns": columns,
    "selective_scan": selective_scan, "vectors": vectors, "causal_conv": convolution, "score_pages": score_pages,
}  # fmt: skip


def choices() -> list[tuple[str, dict[str, int]]]:
    """Return as few choices as have each value of each field once. The interpreter ignores warps and stages."""
    made = []
    for kernel, options in OPTIONS.items():
        tiles = {name: values for name, values in options.items() if not name.startswith("num_")}
        for i in range(max(map(len, tiles.values()))):
            among = enumerate(options.items())
            made.append((kernel, {name: values[(i + place) % len(values)] for place, (name, values) in among}))
    return made


@pytest.mark.parametrize(
    "kernel, choice", choices(), ids=lambda x: x if isinstance(x, str) else ",".join(map(str, x.values()))
)
def test_a_kernel_is_its_twin_whatever_it_chooses(device: torch.device, kernel: str, choice: dict[str, int]) -> None:
    tunable, asked = TUNABLES[kernel], list[tuple[int, ...]]()

    def choose(*sizes: int) -> Any:
        asked.append(sizes)
        return tunable.checked(choice)

    with tunable.instead(choose):
        COMPUTE[kernel](device)
    assert asked, f"{kernel} was not run"


def test_a_choice_is_made_for_a_request_whatever_else_is_in_the_step(device: torch.device) -> None:
    """A kernel asks for the same choice whether a request is alone or among others."""
    pages, tunable, asked = (
        Pages(6, 2, 8, 4, lengths=(1, 3, 20), histories=(300, 70, 3)),
        TUNABLES["attend"],
        set[tuple[int, ...]](),
    )

    def choose(*sizes: int) -> Any:
        asked.add(sizes)
        return tunable.default(*sizes)

    with tunable.instead(choose):
        pages.attend(OnDevice(device))
        together = asked.copy()
        asked.clear()
        for i in range(3):
            pages.attend(OnDevice(device), only=i)
    assert asked == together and len(together) > 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # Torch recommends to compile instead.
def test_what_torch_ships_computes_the_same_over_a_prompt(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    with MadeOn(device):
        outputs = {name: run() for name, run in gpu_prompts.contestants(Heads("tiny", 4, 2, 16), 48)}
    ours = outputs.pop("ours").float()
    assert len(outputs) == 2
    for theirs in outputs.values():
        assert_kernel_close(ours, theirs.float(), torch.bfloat16)


RUNS: dict[str, tuple[str, Callable[[], Run]]] = {
    "decode": ("attend", lambda: gpu_cases._attention_run(HEADS, 2, 1, context=80, n_bytes=1)),
    "prompt": ("attend", lambda: gpu_cases._attention_run(HEADS, 1, 40, context=40, n_bytes=1)),
    "latent": ("attend", lambda: gpu_cases._attention_run(Heads("tiny", 4, 1, 24, True), 1, 1, context=40, n_bytes=1)),
    "4 bits": ("attend", lambda: gpu_cases._attention_run(HEADS, 1, 1, context=80, n_bytes=1, storage=Quantized(4))),
    "splits": ("split", lambda: gpu_cases._attention_run(HEADS, 1, 1, context=300, n_bytes=1)),
    "pages": ("score_pages", lambda: gpu_cases._choose_pages(HEADS, 2)),
    "tails, adds": ("read_states", lambda: gpu_cases._read(LAYERS[0], 1)),
    "tails, erases": ("read_states", lambda: gpu_cases._read(LAYERS[1], 1)),
    "tokens": ("scan_tokens", lambda: gpu_cases._scan(LAYERS[1], 1, 1)),
    "chunks": ("scan_chunks", lambda: gpu_cases._scan(LAYERS[0], 1, 40)),
    "RWKV-7": ("scan_columns", lambda: gpu_cases._by_column(1, 20, 1, 16)),
    "Mamba-1": ("selective_scan", lambda: gpu_cases._selective(2, 40, 16)),
    "convolution": ("causal_conv", lambda: gpu_cases._convolve(1, 9, 40)),
    "RG-LRU": ("vectors", lambda: gpu_cases._linear(2, 70)),
}


@pytest.mark.parametrize(
    ("spec", "make_scan", "state_bytes", "ring_bytes"),
    [
        (rwkv7_spec(2, 8), partial(gpu_tails.make_rwkv7, 2, 8), 512, 192),
        (mamba1_spec(8, 4, 4), partial(gpu_tails.make_mamba1, 8, 4), 128, 40),
    ],
    ids=["RWKV-7", "Mamba-1"],
)
def test_tails_that_run_again_are_measured_beside_bytes(
    device: torch.device,
    spec: RecurrentSpec,
    make_scan: Any,
    state_bytes: int,
    ring_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def once(runs: dict[str, Callable[[], object]], n_rounds: int) -> dict[str, Samples]:
        for run in runs.values():
            run()
        return {name: Samples([1.0 + i]) for i, name in enumerate(runs)}

    monkeypatch.setattr(gpu_tails, "N_BYTES", 1)
    monkeypatch.setattr(gpu_tails, "time_graphs", once)
    with MadeOn(device):
        (found,) = gpu_tails.rows(gpu_tails.Layer("", spec.states[-1], make_scan), 2, (3,), n_rounds=1)
    assert found["reads and writes / reads"] == 2
    assert found["of bytes"] == pytest.approx(2 * state_bytes / (state_bytes + 3 * ring_bytes))


@pytest.mark.parametrize("name", RUNS)
def test_what_is_tuned_runs_the_kernel_and_gives_the_same_each_time(
    device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, constant, value in (
        (gpu_attention, "N_BYTES", 1), (gpu_cases, "N_BYTES", 1), (gpu_states, "N_BYTES", 1 << 10),
        (gpu_states, "TAIL_TOKENS", 3), (gpu_cases, "CONTEXT", 16 * 24),
    ):  # fmt: skip
        monkeypatch.setattr(module, constant, value)
    kernel, make = RUNS[name]
    with MadeOn(device):
        trial = Trial(Case(name, kernel, (make,)), lambda run, n_rounds: 1.0)
        other = next(neighbours(trial.default, OPTIONS[kernel]))
        assert trial._times(other, n_rounds=1) == [1.0], "what is not the same has no time"
