"""Compares greedy texts and log probabilities with those of llama.cpp's server, from the same token ids."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report
from benchmarks.real.programs import Server, llama_server, quantised
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model

_PROMPT_TOKENS, _N_TOKENS = 32, 64
_DTYPES = ("float32", "bfloat16")
_ROUNDING = 0.1
"""The most by which the first two log probabilities may differ where the next token may be either of them.

Both sides round: llama.cpp its inputs to 8 bits in each product, ours to 8 bits of a float's fraction.
"""

NOTE = (
    f"Greedy texts: prompts of {_PROMPT_TOKENS} tokens of the book, each continued by {_N_TOKENS} tokens of llama.cpp. "
    f"Decided: tokens whose log probability is above the next one's by more than {_ROUNDING}. Differences are of the "
    "log probability of the chosen token. In a file as it came, llama.cpp rounds what it multiplies to 8 bits; in F32 "
    "(by llama-quantize, keys and values in 32 bits too) nothing."
)


def agree(report: Report, programs: Path, model: Path, ids: list[int], first: list[int], n_prompts: int) -> None:
    """Add how often our next token is llama.cpp's after the same text, and how far log probabilities differ.

    Prompts are pieces of a text. llama.cpp's continuations of them are fed to both models.
    """
    prompts = [first + ids[at : at + _PROMPT_TOKENS] for at in range(0, len(ids), len(ids) // n_prompts)][:n_prompts]
    for kind in (None, "F32"):
        with nullcontext(model) if kind is None else quantised(programs, model, kind) as path:
            keeps = "f16" if kind is None else "f32"
            with llama_server(programs, path, slots=1, context=2048, keeps=keeps) as server:
                theirs = [_continue(server, prompt) for prompt in prompts]
            for dtype in _DTYPES if kind is None else _DTYPES[:1]:
                own = _compare(path, dtype, prompts, theirs)
                report.add(f"greedy texts of {model.name}", {"file": kind or "as it came", "dtype": dtype, **own})


def _continue(server: Server, prompt: list[int]) -> list[dict[str, Any]]:
    reply = server.post(
        "/completion", prompt=prompt, n_predict=_N_TOKENS, temperature=0, n_probs=2, cache_prompt=False, ignore_eos=True
    )
    return list(reply["completion_probabilities"])


def _compare(path: Path, dtype: str, prompts: list[list[int]], theirs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    model = load_model(path, dtype=dtype, progress=False)  # type: ignore[arg-type]
    memory = HybridMemory(model.memory_spec, "256MiB")
    n_tokens = n_same = n_decided = n_wrong = 0
    differences = list[float]()
    for prompt, said in zip(prompts, theirs, strict=True):
        sequence = memory.open()
        fed = [*prompt, *(token["id"] for token in said[:-1])]
        with memory.step({sequence: fed}, outputs="all") as step:
            found = model(step)[len(prompt) - 1 :].float().log_softmax(-1)
        memory.close(sequence)
        for own, token in zip(found, said, strict=True):
            first, second = (top["logprob"] for top in token["top_logprobs"][:2])
            is_same, is_decided = int(own.argmax()) == token["id"], first - second > _ROUNDING
            n_tokens, n_same = n_tokens + 1, n_same + is_same
            n_decided, n_wrong = n_decided + is_decided, n_wrong + (is_decided and not is_same)
            differences.append(abs(float(own[token["id"]]) - token["logprob"]))
    gaps = torch.tensor(differences)
    return {
        "tokens": n_tokens, "same": n_same, "decided": n_decided, "decided and other": n_wrong,
        "mean difference": float(gaps.mean()), "of 99 %": float(gaps.quantile(0.99)), "most": float(gaps.max()),
    }  # fmt: skip
