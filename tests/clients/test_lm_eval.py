"""Runs EleutherAI's evaluation harness, whose scores are those that transformers computes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer, JambaForCausalLM

PACKAGE = "lm_eval"
EMBEDDED = Path(__file__).parent.parent.parent / "models" / "embedded"
TASK = """
task: pets
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
NAMES = ("Zoe", "Rex", "Milo", "Luna")


def test_scores(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """local-completions: a task of choices, with transformers' own scores."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = [row_of(name, other) for name, other in pairwise([*NAMES, NAMES[0]])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pets.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    asked = {"model": "embedded", "base_url": f"{url}/completions", "tokenizer": str(EMBEDDED), "num_concurrent": 4}
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate("local-completions", model_args=asked, tasks=["pets"], task_manager=manager)
    assert found["results"]["pets"]["acc,none"] == 1.0
    expected = scores_of(rows)
    told = [float(score) for sample in found["samples"]["pets"] for ((score, _),) in sample["resps"]]
    assert told == pytest.approx(expected, abs=1e-4)


def row_of(name: str, other: str) -> dict[str, Any]:
    question = f"<|user|>My cat is called {name}.<|end|><|assistant|>Okay, noted.<|end|>"
    question += "<|user|>What is my cat called?<|end|><|assistant|>"
    return {"question": question, "choices": [f"Your cat is called {each}." for each in (other, name)], "answer": 1}


def scores_of(rows: list[dict[str, Any]]) -> list[float]:
    model, tokenizer, scores = JambaForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED), []
    for row in rows:
        for choice in row["choices"]:
            ids, n_context = tokenizer.encode(row["question"] + choice), len(tokenizer.encode(row["question"]))
            with torch.no_grad():
                rows_SV = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            scores.append(sum(float(rows_SV[i - 1, ids[i]]) for i in range(n_context, len(ids))))
    return scores
