"""Measures how far gradients in float32 are from those in float64, through the memory and by transformers."""

from __future__ import annotations

from benchmarks.harness import Report

CHUNK_TOKENS = 7


def gradient_rounding(*, quick: bool) -> Report:
    """Measure the rounding of gradients in float32, through the memory and by transformers over whole texts.

    The texts are those of the tests: a prompt, a rollback and a fork, in chunks of seven tokens. There is a random
    model of each architecture. An error is the largest difference from transformers' gradient in float64, as a part of
    the largest number of its tensor.
    """
    from tests.memory.training import peers
    from tests.memory.training.texts import SHORT, expect_gradients, go_back
    from tests.models.checkpoints import CONFIGS

    report, seen = Report("gradient_rounding"), set[str]()
    for name, make_config in CONFIGS.items():
        model_type = make_config().model_type
        if model_type in seen or (quick and len(seen) == 3):
            continue
        seen.add(model_type)
        model = peers.random_model(name)
        exact, plain = peers.reference_of(peers.in_float64(model, name)), peers.reference_of(model)
        for reference in (exact, plain):
            expect_gradients(reference, SHORT)
        go_back(model, SHORT, CHUNK_TOKENS)
        (own, where), (theirs, their_where) = peers.worst(model, exact), peers.worst(plain, exact)
        report.add("errors of gradients in float32", {
            "checkpoint": name, "through the memory": own, "in": where, "transformers": theirs, "in its": their_where,
        })  # fmt: skip
    report.notes.append(
        "transformers has no RWKV-7; its reference is the formulas of the paper. In float64, both agree within 1e-10 "
        "for all of these (`tests/memory/training/test_parity.py`), so what the table shows is rounding."
    )
    return report
