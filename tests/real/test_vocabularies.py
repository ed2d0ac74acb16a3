"""In real vocabularies, texts have the ids that llama.cpp gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridmem.chat.prompts import load_tokenizer
from hybridmem.memory import FormatError

NAMES = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt",
    "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
_BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_ids_that_llama_cpp_gives_them(name: str, vocabularies: Path) -> None:
    path = vocabularies / f"{name}.gguf"
    texts = path.with_name(f"{path.name}.inp").read_text().split(_BETWEEN_TEXTS)
    lines = path.with_name(f"{path.name}.out").read_text().splitlines()
    tokenizer = load_tokenizer(path)
    # Most files end with a separator, so there may be one more text than lines.
    assert len(lines) > 40 and len(texts) - len(lines) in (0, 1)
    wrong = {}
    for text, line in zip(texts, lines, strict=False):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != [int(i) for i in line.split()]:
            wrong[text] = ids, line
    assert not wrong


@pytest.mark.parametrize("name", ["aquila", "baichuan", "gpt-neox"])
def test_every_token_is_its_own_name(name: str, vocabularies: Path) -> None:
    """These vocabularies come without texts."""
    tokenizer = load_tokenizer(vocabularies / f"{name}.gguf")
    ids = list(range(len(tokenizer)))
    assert len(ids) > 50_000 and tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids


@pytest.mark.parametrize("name", ["bert-bge", "nomic-bert-moe"])
def test_vocabularies_of_other_kinds_are_refused_by_name(name: str, vocabularies: Path) -> None:
    with pytest.raises(FormatError, match=r"its kind is '(bert|t5)', and those of gpt2"):
        load_tokenizer(vocabularies / f"{name}.gguf")
