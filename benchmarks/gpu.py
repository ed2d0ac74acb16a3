"""Measures the kernels and whole steps on a GPU, beside torch's copy and other libraries."""

from __future__ import annotations

import torch
import typer

from benchmarks.harness import Report


def gpu(*, quick: bool) -> Report:
    from benchmarks.gpu_attention import gpu_attention  # Triton is installed only with a GPU, or for tests.
    from benchmarks.gpu_host import gpu_host
    from benchmarks.gpu_prompts import gpu_prompts
    from benchmarks.gpu_states import gpu_states
    from benchmarks.gpu_step import gpu_step
    from benchmarks.gpu_tails import gpu_tails

    report = Report("gpu")
    report.notes.append(
        f"device: {torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).multi_processor_count} "
        "processors"
    )
    report.notes.append(
        "Asked for: attention and states at 0.8 of the copy or more, drafts at 1.25 of a step or less with 128 "
        "sequences."
    )
    gpu_attention(report, quick=quick)
    gpu_prompts(report, quick=quick)
    gpu_states(report, quick=quick)
    gpu_tails(report, quick=quick)
    gpu_host(report, quick=quick)
    gpu_step(report, quick=quick)
    return report


def require_gpu() -> None:
    """Exit with a message if there is no CUDA device."""
    if not torch.cuda.is_available():
        typer.echo(
            f"this benchmark needs an NVIDIA GPU; torch {torch.__version__} sees none, so nothing is measured", err=True
        )
        raise typer.Exit(1)
