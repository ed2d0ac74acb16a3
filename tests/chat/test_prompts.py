"""A reply ends wherever anything that belongs to a checkpoint says that it ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridmem.chat.prompts import find_stop_ids
from hybridmem.chat.special_tokens import find_turn_end
from hybridmem.memory import FormatError
from tests.chat.test_special_tokens import make_tokenizer


def model_of(eos_token_id: Any = None) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(eos_token_id=eos_token_id), memory_spec=SimpleNamespace(vocab_size=500)
    )


def test_all_ends_are_found_and_those_outside_of_the_vocabulary_are_not(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("template names")  # its end token is </s>, and its turns end with <|im_end|>
    end, turn_end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert find_stop_ids(tokenizer, model_of()) == (end, turn_end) and find_turn_end(tokenizer) == turn_end
    assert find_stop_ids(tokenizer, model_of([end, 7, 10**6])) == (end, 7, turn_end)
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    tokenizer.end_token_ids = [6]  # of a GGUF file
    assert find_stop_ids(tokenizer, model_of(7)) == (end, 7, 9, 8, 6, turn_end)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(FormatError, match="cannot be read"):
        find_stop_ids(tokenizer, model_of())


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages[1].content }} and text"])
def test_a_template_that_names_no_end_adds_none(template: str | None) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = template
    assert find_turn_end(tokenizer) is None
    assert find_stop_ids(tokenizer, model_of()) == (tokenizer.eos_token_id,)
