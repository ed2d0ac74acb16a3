"""Measures the highest speeds of the machine, in the same run as the measurements that are compared with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.harness import Report, interleave
from hybridmem.models.layers.linear import Linear


def copy_gbytes_a_second(n_bytes: int = 256 << 20) -> float:
    """Return the bandwidth of torch's copy: bytes read and bytes written per second, in 10**9."""
    source = torch.ones(n_bytes // 4)  # Unwritten zeros would all be one page, which stays in a cache.
    target = torch.ones_like(source)
    copied = interleave({"copy": lambda: target.copy_(source)}, 9, n_warm_up=2)["copy"]
    return 2 * n_bytes / copied.median_ms / 1e6


def report_ceilings(report: Report, *, quick: bool) -> None:
    """Measure the copy bandwidth, and the speed of a matrix product with plain and with packed weights."""
    report.add(
        "ceilings",
        {"what": "torch copy of 256 MiB", "rows": 0, "figure": copy_gbytes_a_second(), "unit": "GB/s read + written"},
    )
    weight = torch.randn(4096, 768)
    packed = Linear(weight)
    for n_rows in (1, 8, 32, 512):
        x = torch.randn(n_rows, 768)
        times = interleave(
            {"F.linear": lambda x=x: F.linear(x, weight), "packed": lambda x=x: packed(x)},
            9 if quick else 30,
            n_warm_up=3,
        )  # type: ignore[misc]
        for name, samples in times.items():
            gflops = 2 * n_rows * weight.numel() / samples.median_ms / 1e6
            report.add("ceilings", {"what": f"{name}, 4096 x 768", "rows": n_rows, "figure": gflops, "unit": "GFLOP/s"})
