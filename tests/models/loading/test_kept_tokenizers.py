"""Tokenizers that are slow to build are kept on disk. They are read as they were, and never used for another header."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import models, processors

from hybridmem.models.loading.gguf import GgufFile, kept_tokenizers, load_gguf_tokenizer
from hybridmem.models.loading.gguf import tokenizer as building
from tests.models.loading.test_gguf_tokenizers import NORMAL, of_bytes, write

TEXT = " ab  c<|im_end|> é"


class Forgetful(dict[str, Any]):
    """Keeps nothing, so that every tokenizer is made as in a process of its own."""

    def __setitem__(self, digest: str, tokenizer: Any) -> None:
        pass


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the kinds of the tokenizers that were built. All of them are kept, in a cache of their own."""
    monkeypatch.setenv("HYBRID_MEMORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tokenizers, "_SLOW_SECONDS", 0.0)
    kinds, build = list[str](), building._build

    def noted(file: Any, model: str) -> Any:
        kinds.append(model)
        return build(file, model)

    monkeypatch.setattr(building, "_build", noted)
    monkeypatch.setattr(building, "_living", Forgetful())
    return kinds


def kept_files(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "tokenizers").iterdir())


def test_a_kept_tokenizer_is_the_one_that_was_built(built: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", of_bytes(**{"<|im_end|>": NORMAL}), add_bos_token=True, bos_token_id=3)
    first, second = load_gguf_tokenizer(GgufFile(path)), load_gguf_tokenizer(GgufFile(path))
    assert built == ["gpt2"]
    assert second.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
    assert second.encode(TEXT) == first.encode(TEXT) and second.special_tokens_map == first.special_tokens_map
    other = load_gguf_tokenizer(GgufFile(write(tmp_path / "o.gguf", of_bytes(other=NORMAL))))
    assert len(built) == 2 and len(other) == len(of_bytes()) + 1 and len(kept_files(tmp_path)) == 2


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokenizers_of_one_header_share_their_merges_and_nothing_else(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They share them for as long as one of them lives. What is set on one of them changes no other."""
    made, name = list[models.BPE](), "_bpe" if kind == "gpt2" else "_bpe_by_scores"
    make = getattr(building, name)

    def noted(*given: Any, **options: Any) -> models.BPE:
        made.append(make(*given, **options))
        return made[-1]

    monkeypatch.setattr(building, name, noted)
    if kind == "gpt2":
        path = write(tmp_path / "m.gguf", of_bytes(**{"<|im_end|>": NORMAL}), add_bos_token=True, bos_token_id=3)
    else:
        tokens = {"<unk>": 2, "<s>": 3, "</s>": 3, **dict.fromkeys(("▁", "a", "b", "ab", "▁a", "▁ab", "c"), NORMAL)}
        path = write(tmp_path / "m.gguf", tokens, "llama", "default", scores=[-float(i) for i in range(len(tokens))])
    alone = load_gguf_tokenizer(GgufFile(path))
    first, second = load_gguf_tokenizer(GgufFile(path)), load_gguf_tokenizer(GgufFile(path))
    assert len(made) == 1 and second.backend_tokenizer.to_str() == alone.backend_tokenizer.to_str()
    expected, n_tokens = alone.encode(TEXT), len(alone)
    first.add_tokens(["ab", "<new>"])
    first.add_special_tokens({"pad_token": "<pad>"})
    first.chat_template, first.padding_side = "changed", "left"
    first.backend_tokenizer.post_processor = processors.Sequence([])
    first(["a", TEXT], truncation=True, max_length=2, padding=True)
    assert first.encode(TEXT) != expected
    for other in (alone, second, load_gguf_tokenizer(GgufFile(path))):
        assert other.encode(TEXT) == expected and len(other) == n_tokens
        assert other.pad_token is None and other.chat_template != "changed"
    assert len(made) == 1
    del alone, first, second, other
    gc.collect()
    assert load_gguf_tokenizer(GgufFile(path)).encode(TEXT) == expected and len(made) == 2


@pytest.mark.parametrize("damage", [b"", b"x" * 100])
def test_a_damaged_file_is_written_anew(built: list[str], damage: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", of_bytes())
    ids = load_gguf_tokenizer(GgufFile(path)).encode(TEXT)
    (kept,) = kept_files(tmp_path)
    whole = kept.read_bytes()
    kept.write_bytes(damage or whole[:-1])
    assert load_gguf_tokenizer(GgufFile(path)).encode(TEXT) == ids
    assert len(built) == 2 and kept.read_bytes() == whole and kept_files(tmp_path) == [kept]


def test_those_that_were_used_last_stay(built: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept_tokenizers, "_MOST_KEPT", 2)
    paths = [write(tmp_path / f"{i}.gguf", of_bytes(**{f"word{i}": NORMAL})) for i in range(3)]
    for path in (paths[0], paths[1], paths[0], paths[2], paths[0]):
        load_gguf_tokenizer(GgufFile(path))
    assert len(built) == 3 and len(kept_files(tmp_path)) == 2


def test_a_fast_build_and_a_folder_that_takes_no_files_keep_nothing(
    built: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", of_bytes())
    monkeypatch.setattr(kept_tokenizers, "_SLOW_SECONDS", 60.0)
    load_gguf_tokenizer(GgufFile(path))
    assert not (tmp_path / "cache" / "tokenizers").exists()
    monkeypatch.setattr(kept_tokenizers, "_SLOW_SECONDS", 0.0)
    monkeypatch.setenv("HYBRID_MEMORY_CACHE", "/dev/null")
    load_gguf_tokenizer(GgufFile(path))
    assert len(built) == 2
