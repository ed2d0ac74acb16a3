"""`serve --draft-model` takes one budget for both models, requires the same tokenizer, and gives the same replies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hybridmem import EMBEDDED
from hybridmem.chat.commands.fleet_options import FLEET
from hybridmem.chat.commands.option_table import Chosen
from hybridmem.chat.commands.serve import Served, make_served
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.chat.prompts import encode_prompt
from hybridmem.memory import SpecError
from hybridmem.models.loading.load import OpenedModel
from tests.extent import only_in_long


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write a random model with the tokenizer of the embedded one."""
    vocab_size = json.loads((Path(EMBEDDED) / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(EMBEDDED) / name, tmp_path / "small")
    return tmp_path / "small"


def served(**options: object) -> Served:
    rows = SERVE + FLEET
    return make_served(Chosen(rows, {row.name: row.default for row in rows} | options), print)


@only_in_long
def test_a_draft_model_changes_no_reply_and_shares_the_budget(small: Path) -> None:
    texts = {}
    for draft_model in (None, str(small)):
        with_draft = served(draft_model=draft_model, budget="16MiB", threads=1)
        engine = with_draft.engine
        prompts = [encode_prompt(with_draft.tokenizer, text, is_chat=True) for text in ("My cat is Tom.", "Hello!")]
        for _ in range(9):  # A drafter is tried once the cost of plain steps is known.
            generations = [engine.submit(prompt, max_tokens=40) for prompt in prompts]
            engine.run()
        texts[draft_model] = [generation.text for generation in generations]
    assert texts[None] == texts[str(small)] and engine.stats.n_drafted > 0
    assert 8 << 20 < engine.memory.budget_bytes < 16 << 20, "the draft model's memory has a part of the budget"


def test_another_tokenizer_and_a_memory_that_cannot_go_back_are_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, i in vocabulary.items() if i in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    read, load = [], OpenedModel.load
    monkeypatch.setattr(OpenedModel, "load", lambda opened, **how: read.append(opened.place) or load(opened, **how))
    with pytest.raises(SpecError, match=r"another tokenizer: it gives .* choose a draft model of the same family"):
        served(draft_model=str(small), threads=1)
    assert len(read) == 1, "only the model's weights were read, not those of the draft model"
    with pytest.raises(SpecError, match="--rollback-window"):
        served(draft_model=str(small), rollback_window=0, threads=1)
