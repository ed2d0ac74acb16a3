"""Makes the documentation's table of the architectures that load.

It shows how many bytes each architecture remembers, and how close its logits are to those of transformers.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from benchmarks.harness import Report
from hybridmem.memory import AttentionSpec, HybridMemory, IndexSpec
from hybridmem.models import ARCHITECTURES, ATTACHABLE, load_model, plan_memory
from hybridmem.models.families.rwkv7 import RWKV7Config
from hybridmem.models.hf.classes import NOT_ATTACHED
from hybridmem.models.loading.architectures import REFUSED
from hybridmem.models.loading.gguf.configs import classes_in_files

PARITY = Path(__file__).parent / "results" / "parity.json"
WINDOW = 64
_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
PUBLISHED: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27], "mamba_d_state": 128},
    "DeepseekV2ForCausalLM": {
        "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "intermediate_size": 12_288, "routed_scaling_factor": 16.0,
    },
    "FalconMambaForCausalLM": {"hidden_size": 4096, "num_hidden_layers": 64},
    "GraniteMoeHybridForCausalLM": {
        "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10,
        "mamba_d_state": 128,
        "layer_types": ["full_attention" if i in (5, 15, 25, 35) else "linear_attention" for i in range(40)],
        "vocab_size": 100_352,
        "intermediate_size": 768, "shared_intermediate_size": 1536,
    },
    "Lfm2ForCausalLM": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    },
    "Lfm2MoeForCausalLM": {
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    },
    "MiniMaxForCausalLM": {
        "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128,
        "intermediate_size": 9216, "num_local_experts": 32,
        "layer_types": ["full_attention" if i % 8 == 7 else "linear_attention" for i in range(80)],
    },
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": _NEMOTRON_H_8B, "hidden_size": 4096, "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128,
    },
    # Transformers names no sizes of the index and none of the n-grams, so these are assumed.
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
        "indexer_compress_ratio": 16, "ple_layer_ids": [2], "eos_token_id": 248_046,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
"""Fields of configs in which transformers' defaults differ from the published model."""


def published_config(architecture: str) -> PreTrainedConfig:
    """Return the config of a model of this architecture, nearly as it was published.

    Transformers' defaults are such a config, with the few exceptions in `PUBLISHED`.
    """
    config_class = (
        RWKV7Config if architecture == "RWKV7ForCausalLM" else getattr(transformers, architecture).config_class
    )
    config: PreTrainedConfig = config_class(**PUBLISHED.get(architecture, {}))
    return config


def checkpoint_configs() -> dict[str, Callable[[], PreTrainedConfig]]:
    """Return the configs of the random checkpoints of the tests, by their names."""
    from tests.models.checkpoints import CONFIGS

    return CONFIGS


def parity(*, names: list[str], quick: bool) -> Report:
    """Measure the largest difference between our logits and transformers', on random checkpoints in float32.

    The standard deviation of transformers' logits is at least 1.

    Args:
        names: checkpoints of `checkpoint_configs`.
        quick: only the first two are measured.
    """
    from tests.models.checkpoints import Peer, draw_tokens, write_checkpoint

    report = Report("parity")
    tokens, n_prompt = draw_tokens(40), 24
    for name in names[: 2 if quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(Path(folder), checkpoint_configs()[name]())
            config = json.loads((path / "config.json").read_text())
            (architecture,) = config["architectures"]
            model, expected = load_model(folder, progress=False), Peer.load(Path(folder)).logits(tokens)
        errors = []
        for steps in ([tokens], [tokens[:n_prompt], *([token] for token in tokens[n_prompt:])]):
            memory = HybridMemory(model.memory_spec, "64MiB", rollback_window=4)
            sequence, logits = memory.open(), []
            for fed in steps:
                with memory.step({sequence: fed}, outputs="all") as step:
                    logits.append(model(step))
            errors.append(float((torch.cat(logits) - expected).abs().max()))
        report.add("parity", {
            "architecture": architecture, "checkpoint": name,
            "std of logits": float(expected.std()), "one shot": errors[0], "16 single steps": errors[1],
        })  # fmt: skip
    return report


def table() -> str:
    """Return the table in Markdown, with a row for each architecture in the registry, and one for the refused ones."""
    measured = json.loads(PARITY.read_text())["tables"]["parity"]
    lines = [
        f"| architecture | layers that remember | K/V a token | states | tails, {WINDOW} tokens | parity | `attach` "
        "| GGUF | sees |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    in_files = classes_in_files()
    # Names with other endings load the same classes.
    for architecture in sorted(name for name in ARCHITECTURES if name.endswith("ForCausalLM") or name in _SEE_ALONE):
        spec = plan_memory(published_config(architecture), architecture, dtype="bfloat16")
        kinds = Counter(_kind(memory) for layer in spec.layers for memory in layer)
        bytes_of = HybridMemory(spec, "1TiB", rollback_window=WINDOW, page_tokens=16, fold="replay").usage().block_bytes
        # A page of an index has as many keys as others have rows, whatever a key stands for.
        span_tokens = max((m.span_tokens for _, m in spec.of_kind("index") if isinstance(m, IndexSpec)), default=1)
        row_bytes = sum(bytes_of.get(pool, 0) // (span_tokens if pool == "pages of index" else 1) for pool in _ALL_ROWS)
        worst = _worst(measured, architecture)
        name = _short(architecture)
        cells = [
            name, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), _size(row_bytes // 16),
            _size(bytes_of.get("states", 0)), _size(bytes_of.get("tails", 0)), f"{worst:.0e}",
            "yes" if architecture in ATTACHABLE else "–", "yes" if architecture in in_files else "–",
            ", ".join(SEES.get(architecture, ("–",))),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Loaded, but not attached:", "", "| architecture | why not |", "|---|---|"]
    lines += [f"| {_short(name)} | {why} |" for name, why in sorted(NOT_ATTACHED.items())]
    lines += ["", f"Of transformers {MINOR}, all language models with recurrent states load."]
    if not REFUSED:
        return "\n".join(lines)
    lines += ["", "These classes, which have one as a part, do not load yet:", "", "| class | why not |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in sorted(REFUSED.items())]
    return "\n".join(lines)


def _worst(measured: list[dict[str, Any]], architecture: str) -> float:
    of_class = [row for row in measured if row["architecture"] == architecture]
    if not of_class:
        raise ValueError(
            f"{PARITY.name} has no parity of {architecture}; measure that of all classes: "
            "python -m benchmarks parity --out benchmarks/results"
        )
    return max(max(row["one shot"], row["16 single steps"]) for row in of_class)


_ALL_ROWS = ("pages", "pages of indexed attention", "pages of index")
"""Pools of rows that a sequence keeps for each of its tokens."""
MINOR = ".".join(transformers.__version__.split(".")[:2])
SEES = {
    "Glm5NextForConditionalGeneration": ("Glm5Next",), "Lfm2ForCausalLM": ("Lfm2Vl",), "Lfm3ForCausalLM": ("Lfm3Vl",),
    "NemotronHForCausalLM": ("NemotronH_Omni_Reasoning_V3",),
    "Qwen3_5ForCausalLM": ("Qwen3_5", "MiniCPMV4_6", "MiniCPMV4_7"), "Qwen3_5MoeForCausalLM": ("Qwen3_5Moe",),
    "Qwen4ExpForCausalLM": ("Qwen4Exp",),
}  # fmt: skip
"""Language models -> the architectures of those that also see, without the ending ForConditionalGeneration."""
_SEE_ALONE = ("Glm5NextForConditionalGeneration",)
"""Architectures whose language model has no name of its own."""
_STATES = re.compile(r"update_(recurrent|conv)_state|set_linear_cache|rnn_state|recurrent_states|state: list\[")
"""What modules of transformers say that hold states."""
_GENERATES = re.compile(r"^class (\w+)\([^)]*\bGenerationMixin\b", re.MULTILINE)
_TYPE = re.compile(r"^    model_type = \"(\w+)\"", re.MULTILINE)
_PART = re.compile(r"\bmodel_type=\"(\w+)\"")
"""What configs say of the language model in them, unless a file says otherwise."""


def recurrent_classes() -> list[str]:
    """Return the classes of the installed transformers that generate text and have states, or a part that has some.

    The sources of transformers' modules are read, not imported, because there are hundreds of them.
    """
    folders = folders_of_transformers()
    has_states = {folder: bool(_STATES.search(text_of(folder, "modeling"))) for folder in folders}
    types = {
        name for folder in folders if has_states[folder] for name in _TYPE.findall(text_of(folder, "configuration"))
    }
    return [
        name
        for folder in folders
        if has_states[folder] or not types.isdisjoint(_PART.findall(text_of(folder, "configuration")))
        for name in generating_classes(folder)
    ]


def folders_of_transformers() -> list[Path]:
    return sorted(path.parent for path in Path(transformers.__file__).parent.glob("models/*/__init__.py"))


def generating_classes(folder: Path) -> list[str]:
    """Return the classes of a folder of transformers that have `generate`."""
    return _GENERATES.findall(text_of(folder, "modeling"))


def text_of(folder: Path, what: str) -> str:
    """Return the sources of a folder of transformers: its `modeling` or its `configuration`."""
    return "".join(path.read_text() for path in sorted(folder.glob(f"{what}_*.py")))


def _short(architecture: str) -> str:
    return re.sub("For(CausalLM|ConditionalGeneration)$", "", architecture)


PAGE = Path(__file__).parent.parent / "docs" / "results" / "architectures.md"
_BEGIN, _END = "<!-- architectures: python -m benchmarks table -->\n", "<!-- end of architectures -->"


def table_in_docs() -> str:
    """Return the table that is in the documentation now."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].strip()


def write_table() -> None:
    """Replace the table in the documentation by a new one."""
    before, begin, rest = PAGE.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    PAGE.write_text(f"{before}{begin}\n{table()}\n\n{end}{after}")


def _kind(memory: object) -> str:
    if isinstance(memory, AttentionSpec):
        kind = "attention" if memory.value_dim is None else "latent attention"
        kind = kind if memory.n_chosen is None else f"indexed {kind}"
        return kind if memory.window is None else f"{kind} over {memory.window}"
    if isinstance(memory, IndexSpec):
        spans = f" in spans of {memory.span_tokens}" if memory.span_tokens > 1 else ""
        return f"index of {memory.n_chosen} rows{spans}"
    return str(memory.family)  # type: ignore[attr-defined]


def _size(n_bytes: int) -> str:
    """Return a size with three digits, in binary units."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes} B" if n_bytes else "–"
