"""A prompt's tokens are those of the checkpoint's own file.

A reply ends at every token that the checkpoint names as an end.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from hybridmem.chat.prompts import find_stop_ids, load_tokenizer
from hybridmem.chat.special_tokens import find_turn_end
from hybridmem.memory import FormatError
from hybridmem.models import EMBEDDED
from tests.chat.special_tokens.test_special_tokens import make_tokenizer


def model_of(eos_token_id: Any = None) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(eos_token_id=eos_token_id), memory_spec=SimpleNamespace(vocab_size=500)
    )


def test_all_ends_are_found_and_those_outside_of_the_vocabulary_are_not(tmp_path: Path) -> None:
    # The tokenizer's end token is </s>, and its turns end with <|im_end|>.
    tokenizer = make_tokenizer("template names")
    end, turn_end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert find_stop_ids(tokenizer, model_of()) == (end, turn_end) and find_turn_end(tokenizer) == turn_end
    assert find_stop_ids(tokenizer, model_of([end, 7, 10**6])) == (end, 7, turn_end)
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    tokenizer.end_token_ids = [6]  # A GGUF file gives such ids.
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


@pytest.mark.parametrize("of_class", ["GPTNeoXTokenizer", "GemmaTokenizer", "Qwen2Tokenizer"])
def test_the_tokenizers_file_counts_and_not_the_class_that_a_config_names(of_class: str, tmp_path: Path) -> None:
    """The first two classes of transformers would replace the pre-tokenizer of the file by one of their own."""
    written = json.loads((EMBEDDED / "tokenizer.json").read_text())
    digits = {"type": "Split", "pattern": {"Regex": r"\d{1,2}"}, "behavior": "Isolated", "invert": False}
    bytes_alone = written["pre_tokenizer"] | {"use_regex": False}
    written["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, bytes_alone]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": of_class}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    text = "In 12345 we lived\n  there. "
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text) == expected and tokenizer.decode(expected) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == (config["bos_token"], config["eos_token"])
