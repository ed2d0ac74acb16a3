"""`hybrid-memory plan` reads configs and prints plans. Its JSON agrees with what memories hold that are fed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.planning.quantities import read_share, read_tokens
from hybridmem.memory import HybridMemory, MemorySpec, SpecError
from hybridmem.memory.eviction import H2O
from hybridmem.memory.quantization import Quantized
from hybridmem.models import EMBEDDED, load_model
from hybridmem.models.loading.folders import read_config
from hybridmem.models.loading.load import dry_model, weight_bytes
from tests.extent import few_cases, only_in_long
from tests.models.families.qwen3_5 import qwen3_5_config

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
GIB = 1 << 30


def plan(name: str, *options: str) -> dict[str, Any]:
    """Return the plan of a published config, by default of a budget for memories alone, on a GPU."""
    usual = ["--model", str(CONFIGS / f"{name}.json"), "--json", "--weights", "none", "--device", "cuda"]
    result = CliRunner().invoke(app, ["plan", *usual, *options])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def spec_of(name: str, device: str) -> MemorySpec:
    from dataclasses import replace

    config, _ = read_config(CONFIGS / f"{name}.json")
    return replace(dry_model(config, config.architectures[0]).memory_spec, device=torch.device(device))


def held_bytes(spec: MemorySpec, n_tokens: int, window: int, **options: Any) -> dict[str, int]:
    memory = HybridMemory(spec, 1 << 50, device="meta", rollback_window=window, **options)
    memory.run(None, {memory.open(): [1] * n_tokens})
    return memory.usage().by_kind


@few_cases
@pytest.mark.parametrize(
    ("name", "context", "n_tokens", "window", "device"),
    [
        ("jamba-1.5-mini", "3k", 3072, 64, "cuda"), ("jamba-1.5-large", "2000", 2000, 16, "cuda"),
        ("granite-4.0-h-tiny", "2k", 2048, 64, "cpu"),
        ("nemotron-h-8b", "1500", 1500, 32, "cuda"), ("falcon-h1-7b", "1k", 1024, 0, "cuda"),
        ("mamba-2.8b", "1k", 1024, 64, "cpu"), ("mamba2-2.7b", "1k", 1024, 64, "cuda"),
    ],
)  # fmt: skip
def test_figures_are_those_of_a_memory_that_is_fed(
    name: str, context: str, n_tokens: int, window: int, device: str
) -> None:
    found = plan(name, "--budget", "80GiB", "--context", context, "--window", str(window), "--device", device)
    session = found["session"]
    assert session["by_kind"] == held_bytes(spec_of(name, device), session["most_at"], window)
    assert (found["context_tokens"], session["n_tokens"]) == (n_tokens, n_tokens) and session["most_at"] <= n_tokens
    assert found["n_sessions"] == 80 * GIB // sum(session["by_kind"].values())


def test_where_attention_overtakes_states() -> None:
    found, spec = plan("jamba-1.5-mini", "--budget", "80GiB", "--context", "8k"), spec_of("jamba-1.5-mini", "cuda")
    at = found["attention_overtakes_states_at"]
    assert found["attention_token_bytes"] == 16 * 1024
    for n_tokens, is_more in ((at, True), (at - 1, False)):
        held = held_bytes(spec, n_tokens, 64)
        assert (held["pages"] > held["states"] + held["tails"]) is is_more
    alone = plan("mamba-2.8b", "--context", "1k")
    assert (
        alone["attention_overtakes_states_at"] is None
        and alone["attention_token_bytes"] is None
        and alone["policies"] == []
    )


@only_in_long
def test_what_policies_and_few_bits_buy() -> None:
    found, spec = (
        plan("granite-4.0-h-tiny", "--budget", "8GiB", "--context", "2000", "--keep", "0.1"),
        spec_of("granite-4.0-h-tiny", "cuda"),
    )
    policies = {name: choice for choice in found["policies"] for name in choice["names"]}
    storages = {name: choice for choice in found["storages"] for name in choice["names"]}
    assert policies.keys() == {
        "Recent",
        "KNorm",
        "H2O",
        "Scissorhands",
        "TOVA",
        "SnapKV",
        "PyramidKV",
        "ExpectedAttention",
        "Quest",
    }
    assert storages.keys() == {"8 bits", "4 bits", "2 bits", "float8"}
    h2o = sum(held_bytes(spec.with_policy(H2O(200)), 2000, 64).values())
    assert (policies["H2O"]["session_bytes"], policies["H2O"]["n_sessions"]) == (h2o, 8 * GIB // h2o)
    four_bits = max(sum(held_bytes(spec.with_storage(Quantized(4)), n, 64).values()) for n in range(1936, 2001))
    assert (storages["4 bits"]["session_bytes"], storages["4 bits"]["n_sessions"]) == (four_bits, 8 * GIB // four_bits)


def test_what_does_not_suit_says_why() -> None:
    quest = next(c for c in plan("granite-4.0-h-tiny", "--context", "40")["policies"] if "Quest" in c["names"])
    assert "always reads" in quest["why_not"] and quest["n_sessions"] == 0


@only_in_long
def test_states_in_16_bits_and_weights() -> None:
    full, half = (plan("nemotron-h-8b", "--context", "1k", "--state-dtype", dtype) for dtype in ("auto", "bfloat16"))
    assert full["session"]["by_kind"]["states"] > 1.9 * half["session"]["by_kind"]["states"]
    config, _ = read_config(CONFIGS / "nemotron-h-8b.json")
    n_bytes = weight_bytes(dry_model(config, "NemotronHForCausalLM", dtype="bfloat16"))
    found = plan("nemotron-h-8b", "--context", "1k", "--budget", "80GiB", "--weights", "auto")
    assert (found["weight_bytes"], found["budget_bytes"]) == (n_bytes, 80 * GIB - n_bytes)
    assert (
        found["n_sessions"] == (80 * GIB - n_bytes) // sum(found["session"]["by_kind"].values()) and full["model_fits"]
    )
    assert full["weight_bytes"] == n_bytes and full["budget_bytes"] == GIB


@only_in_long
def test_no_session_fits_beside_weights_that_do_not() -> None:
    """Sessions fit if the budget is for memories alone. The plan shows the weights in either case."""
    options = ["plan", "--model", str(CONFIGS / "jamba-1.5-mini.json"), "--budget", "80GiB", "--context", "2k"]
    printed, alone = (CliRunner().invoke(app, [*options, *more]).stdout for more in ([], ["--weights", "none"]))
    assert "The model does not fit into 80 GiB: its weights take 96.1 GiB." in printed and "sessions fit" not in printed
    assert "sessions fit into 80 GiB; the weights take 96.1 GiB beside." in alone
    found = plan("jamba-1.5-mini", "--budget", "80GiB", "--context", "2k", "--weights", "auto")
    assert (found["model_fits"], found["budget_bytes"], found["n_sessions"]) == (False, 0, 0)
    assert all(choice["n_sessions"] == 0 for name in ("policies", "storages", "peers") for choice in found[name])


def test_a_terminal_gets_tables(tmp_path: Path) -> None:
    hostile = tmp_path / "[bold]\x1b[31mred.json"
    hostile.write_text((CONFIGS / "jamba-1.5-mini.json").read_text())
    result = CliRunner().invoke(app, ["plan", "--model", str(hostile), "--budget", "100GiB", "--device", "cuda"])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout and "[bold]\\x1b[31mred.json" in result.stdout.replace("\n", "")
    for word in (
        "states (body, head)",
        "sessions fit into 100 GiB, of which the weights take 96.1 GiB.",
        "H2O",
        "4 bits",
        "llama.cpp",
        "vLLM",
        "SGLang",
        "not possible",
    ):
        assert word in result.stdout
    assert "on cuda: 262,144 tokens a session" in " ".join(result.stdout.split()), "the config's own context"
    encoder = CliRunner().invoke(app, ["plan", "--context", "1k", "--encoder", "10"])
    assert encoder.exit_code == 1 and "no encoder" in encoder.stderr


def test_it_plans_for_what_is_there() -> None:
    """The default is this machine's device and the model's own context.

    If a config names no context, the plan takes 32k tokens.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, n_tokens in {"mamba2-2.7b": 32_768, "jamba-1.5-mini": 262_144}.items():
        options = ["--model", str(CONFIGS / f"{name}.json"), "--json", "--weights", "none"]
        found = json.loads(CliRunner().invoke(app, ["plan", *options]).stdout)
        assert (found["device"], found["context_tokens"]) == (device, n_tokens)


@pytest.mark.parametrize(
    ("text", "n_tokens"),
    [("1", 1), ("32768", 32768), ("32k", 32768), (" 128K ", 131072), ("1M", 1 << 20), ("1.5k", 1536), ("16m", 1 << 24)],
)
def test_numbers_as_people_write_them(text: str, n_tokens: int) -> None:
    assert read_tokens("--context", text) == n_tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "1e6", "1.0001k", "17M", "32 000", "32kB", "NaN", "٣", "9" * 50])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(SpecError, match="--context"):
        read_tokens("--context", text)


def test_shares() -> None:
    assert [read_share("--keep", text) for text in ("20%", "0.2", ".5", "100%", "1")] == [0.2, 0.2, 0.5, 1.0, 1.0]
    for text in ("0", "0%", "2", "101%", "-1", "a fifth", ""):
        with pytest.raises(SpecError, match="--keep"):
            read_share("--keep", text)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--budget", "many"], "budget"), (["--context", "long"], "--context"), (["--keep", "all"], "--keep"),
        (["--device", "moon"], "--device"),
        (["--dtype", "int3"], "int3"), (["--state-dtype", "int3"], "--state-dtype"),
        (["--model", "nowhere"], "nowhere"),
        (["--model", "."], "config.json"), (["--weights", "int3"], "int3"),
        (["--encoder", "9"], "no encoder"), (["--keep", "200%"], "at most 1"),
        (["--context", "1k", "--window", "99999999"], "than a session of 1,024 tokens; give fewer tokens"),
    ],
)  # fmt: skip
def test_nonsense_is_one_line(options: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", *options])
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and word in result.stderr


def test_configs_that_are_none_are_one_line(tmp_path: Path) -> None:
    for name, content in (
        ("a.json", "{"),
        ("b.json", "[1]"),
        ("c.json", '{"architectures": ["Nothing"]}'),
        ("d.json", '{"architectures": 5}'),
        ("e.bin", ""),
    ):
        (tmp_path / name).write_text(content)
        result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path / name)])
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1), (name, result.output)
        assert "c.json" in name or "give a checkpoint's folder, a GGUF file" in result.stderr


@only_in_long
def test_sessions_beyond_the_context_of_the_model_are_told() -> None:
    """The figures are still those of such sessions."""
    for context, is_told in (("256k", False), ("1m", True)):
        options = ["plan", "--model", str(CONFIGS / "jamba-1.5-mini.json"), "--budget", "160GiB", "--context", context]
        shown = " ".join(CliRunner().invoke(app, options).stdout.split())
        assert ("The model was made for 262,144 tokens: generate, chat and serve end a reply there" in shown) is is_told
    found = plan("jamba-1.5-mini", "--context", "1m")
    assert (found["context_tokens"], found["own_context_tokens"]) == (1 << 20, 1 << 18)
    assert plan("mamba-2.8b", "--context", "1k")["own_context_tokens"] is None


@only_in_long
def test_a_draft_model_takes_its_part_of_the_budget() -> None:
    """The plan counts sessions that fit into both memories. `serve` gives them the same shares of the budget."""
    large, small = (plan(name, "--context", "8k", "--budget", "80GiB") for name in ("nemotron-h-8b", "mamba2-2.7b"))
    options = ["--context", "8k", "--budget", "80GiB", "--draft-model", str(CONFIGS / "mamba2-2.7b.json")]
    both = plan("nemotron-h-8b", *options)
    assert both["draft_session"] == small["session"] and large["draft_session"] is None
    sizes = large["session"]["most_bytes"], small["session"]["most_bytes"]
    assert 0 <= 80 * GIB // sum(sizes) - both["n_sessions"] <= 1 and both["n_sessions"] > 0
    assert both["weight_bytes"] == large["weight_bytes"] + small["weight_bytes"]


@only_in_long
def test_a_draft_head_takes_its_part_of_the_budget(tmp_path: Path) -> None:
    """Its weights and memory are those of the head that is loaded. Without a head, auto plans without one."""
    from tests.models.draft_heads.mtp_checkpoints import write_mtp_checkpoint  # It skips where transformers is older.

    config, place = qwen3_5_config(), tmp_path / "with-a-head"
    write_mtp_checkpoint(place, config)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(place / "config.json", alone)
    tensors = load_file(place / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if name.startswith("mtp.")}, alone / "model.safetensors")

    def planned(model: Path | str, *options: str) -> dict[str, Any]:
        usual = ["--model", str(model), "--json", "--context", "1k", "--budget", "64MiB", "--device", "cpu"]
        result = CliRunner().invoke(app, ["plan", *usual, *options])
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout))

    without, own, other = (
        planned(place),
        planned(place, "--draft-head", "auto"),
        planned(place, "--draft-head", str(alone)),
    )
    model = load_model(place, draft_head=True)
    # Not those of the loaded model: products of some processors fill small weights up, which a plan does not count.
    head_bytes = sum(x.nbytes for name, x in tensors.items() if name.startswith("mtp."))
    assert own["weight_bytes"] - without["weight_bytes"] == head_bytes > 0
    assert own["draft_session"]["by_kind"] == held_bytes(model.draft_head.memory_spec, 1024, 64)
    assert own["n_sessions"] < without["n_sessions"] and without["draft_session"] is None
    assert {key: other[key] for key in ("weight_bytes", "draft_session", "n_sessions")} == {
        key: own[key] for key in ("weight_bytes", "draft_session", "n_sessions")
    }
    assert planned("embedded", "--draft-head", "auto")["draft_session"] is not None, "its head is beside its files"
    plain_place = tmp_path / "plain"
    shutil.copytree(place, plain_place)
    kept = {name: x for name, x in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, plain_place / "model.safetensors", {"format": "pt"})
    shutil.copytree(alone, plain_place / "draft_head")
    assert planned(plain_place, "--draft-head", "auto")["draft_session"] == own["draft_session"]
    for options, message in (
        (["--model", str(place), "--draft-head", str(EMBEDDED)], "holds no draft head"),
        (["--model", str(place), "--draft-head", "auto", "--draft-model", "embedded"], "leave one out"),
        (["--model", str(CONFIGS / "jamba-1.5-mini.json"), "--draft-head", "auto"], "config alone"),
    ):
        result = CliRunner().invoke(app, ["plan", *options])
        assert result.exit_code == 1 and message in result.stderr, result.output
