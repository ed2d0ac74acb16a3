"""Tokenizers are built from the headers of GGUF files. `tests/real` compares the ids of real vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES, GGUFWriter
from tokenizers import Regex, pre_tokenizers

from hybridmem.chat.prompts import load_tokenizer
from hybridmem.memory import FormatError
from hybridmem.models.loading.gguf.header import BLOCK_TYPES
from hybridmem.models.loading.gguf.pre_tokenizers import PRE_TOKENIZERS

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "In 2024, I'LL don't\n\n  stop   12345 café 你好 x != y_z\tГород HTTPServer"


def write(path: Path, tokens: dict[str, int], model: str = "gpt2", pre: str | None = "gpt-2", **more: Any) -> Path:
    """Write a file that has a vocabulary (token -> type) and nothing else."""
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list([*tokens])
    writer.add_token_types([*tokens.values()])
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    merges, scores = more.pop("merges", None), more.pop("scores", None)
    if model != "llama":
        writer.add_token_merges([" ".join(pair) for pair in merges or [("a", "b")]])
    else:
        writer.add_token_scores(scores)
    for name, value in more.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_bytes(**more: int) -> dict[str, int]:
    return dict.fromkeys(LETTERS, NORMAL) | {"ab": NORMAL} | more


def pieces(name: str, text: str = TEXT) -> list[str]:
    """Cut a text as vocabularies with this `pre` do."""
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[name].expressions]
    return [piece for piece, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


def test_block_types_are_those_of_the_writer() -> None:
    assert {n: tuple(of) for n, of in BLOCK_TYPES.items()} == {
        kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()
    }


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_rule_cuts_a_text_into_its_pieces(name: str) -> None:
    found = pieces(name)
    assert "".join(found) == TEXT and len(found) > 8


@pytest.mark.parametrize(
    ("names", "digits", "suffix"),
    [
        (("gpt-2", "mpt", "olmo"), ["12345"], "'t"), (("qwen2", "qwen35", "smollm", "tekken"), [*"12345"], "'t"),
        (("llama-bpe", "falcon3", "gpt-4o", "deepseek-v3"), ["123", "45"], "'t"),
        (("tiny_aya",), ["12", "345"], "'t"), (("ufakzeka",), [*"12345"], "'t"),
    ],
)  # fmt: skip
def test_digits_are_cut_as_the_models_were_trained(names: tuple[str, ...], digits: list[str], suffix: str) -> None:
    for name in names:
        assert pieces(name, "12345") == digits, name
        assert suffix in pieces(name, "don't") or name in ("gpt-4o", "deepseek-v3", "tekken", "tiny_aya"), name


def test_signs_of_chinese_are_words_of_their_own_for_kimi() -> None:
    assert pieces("kimi-k2", "HelloWorld汉字Word's  汉/\nかな") == [
        "Hello", "World", "汉字", "Word's", " ", " ", "汉", "/\n", "かな",
    ]  # fmt: skip
    assert pieces("kimi-k2", " a/\n/b 1234") == [" a", "/\n", "/b", " ", "123", "4"]


def test_added_tokens_keep_their_ids_and_texts(tmp_path: Path) -> None:
    """This also holds for spaces that indent programs, and for marks with letters that stand for no byte."""
    added = {"    ": USER_DEFINED, "<｜end▁of▁sentence｜>": CONTROL, "[PAD7]": USER_DEFINED}
    path = write(tmp_path / "m.gguf", of_bytes(**added), bos_token_id=len(LETTERS) + 2, add_bos_token=True)
    tokenizer, first = load_tokenizer(path), len(LETTERS) + 1
    assert len(tokenizer) == first + 3
    ids = tokenizer.encode("ab    a<｜end▁of▁sentence｜>[PAD7]", add_special_tokens=False)
    assert ids == [len(LETTERS), first, LETTERS.index("a"), first + 1, first + 2]
    assert tokenizer.decode(ids) == "ab    a<｜end▁of▁sentence｜>[PAD7]"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab    a[PAD7]"
    assert tokenizer.encode("ab") == [first + 1, len(LETTERS)]


def test_a_word_of_the_vocabulary_is_taken_though_its_merges_lead_elsewhere(tmp_path: Path) -> None:
    tokens, merges = of_bytes(bc=NORMAL, abc=NORMAL), [("b", "c"), ("a", "b"), ("ab", "c")]
    for pre, found in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "bc"])):
        tokenizer = load_tokenizer(write(tmp_path / f"{pre}.gguf", tokens, pre=pre, merges=merges))
        assert tokenizer.tokenize("abc") == found


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentence_piece_merges_what_scores_highest(adds_space: bool, tmp_path: Path) -> None:
    """Unknown text is spelled by bytes. All spaces of the text are kept, and one is added where the text begins."""
    words = ["▁", "a", "b", "c", "bc", "ab", "▁ab", "▁▁"]
    tokens = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL} | {f"<0x{i:02X}>": BYTE for i in range(256)}
    tokens |= dict.fromkeys(words, NORMAL)
    scores = [0.0] * (len(tokens) - len(words)) + [-float(i) for i in range(len(words))]
    path = write(tmp_path / "m.gguf", tokens, "llama", "default", scores=scores, add_space_prefix=adds_space)
    tokenizer = load_tokenizer(path)
    first = ["▁"] if adds_space else []
    assert tokenizer.tokenize("abc") == [*first, "a", "bc"]
    assert tokenizer.tokenize(" ab") == [*first, "▁ab"]
    assert tokenizer.tokenize("aé") == [*first, "a", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a")[0] == 1
    for text in ("abc", "a  b é c", "c "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("tokens", "options", "why"),
    [
        (of_bytes(), {"pre": "no-such-rule"}, "'no-such-rule' .* is not known; put tokenizer.json"),
        (of_bytes(), {"model": "bert"}, "its kind is 'bert', and those of gpt2, gemma4, llama, rwkv"),
        ({"<unk>": 2, "a": NORMAL}, {"model": "llama", "scores": [0.0]}, "1 scores for 2 tokens"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    tokens: dict[str, int], options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=why):
        load_tokenizer(write(tmp_path / "m.gguf", tokens, **options))
