"""Holds the models on which every promise is tested, and the oracle: a sequence that never saw the removed tokens."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as StepsOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Sequence
from hybridmem.memory.eviction import Budget, EvictionPolicy, Quest
from hybridmem.memory.quantization import Storage
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.testing.subjects import POLICIES, STORAGES
from hybridmem.models import LanguageModel, load_model
from tests.models import checkpoints
from tests.tolerances import TOLERANCE
from tests.toy import HOST, FamilyToy, Toy

SUBJECTS = (
    *("toy", "toy-attention", "toy-recurrent", "toy-window", "jamba", "mamba", "toy replay", "mamba replay"),
    *("toy-sparse", "toy-attention-sparse", "toy-sparse replay", "toy-quest", "toy-attention-quest"),
    *("toy-4-bit", "toy-attention-8-bit", "toy-float8"),
    *(
        "toy-h2o",
        "toy-attention-recent-2-bit",
        "toy-knorm-float8",
        "toy-attention-tova-4-bit",
        "toy-scissorhands",
        "toy-snapkv-8-bit",
    ),
    *("toy-attention-pyramid", "toy-expected-4-bit", "toy-quest-4-bit", "toy-attention-quest-float8"),
    *("toy bfloat16", "toy-h2o-8-bit bfloat16", "toy-quest bfloat16", "jamba bfloat16", "jamba int8"),
    *(f"family:{name}" for name in FAMILIES),
    "family:gated_delta defer",
    "family:mamba1 defer",
    "family:mlstm defer",
    "family:rwkv7 defer",
    "model:bailing-hybrid",
    "model:bamba",
    "model:bamba defer",
    "model:deepseek-v2-three-of-eight-experts-in-groups",
    "model:deepseek-v3",
    "model:falcon-h1",
    "model:falcon-mamba",
    "model:gemma2",
    "model:gemma3",
    "model:glm5-next-two-of-eight-experts-in-groups",
    "model:gpt-oss",
    "model:granite-moe-hybrid",
    "model:inkling-two-of-four-experts",
    "model:inkling2-three-of-four-experts",
    "model:inkling2-loop",
    "model:kimi-linear",
    "model:lara-mini",
    "model:lfm2",
    "model:lfm2-moe-three-of-four-experts",
    "model:lfm3",
    "model:llama",
    "model:mamba2",
    "model:minimax",
    "model:mistral",
    "model:nemotron-h",
    "model:olmo-hybrid",
    "model:olmo3",
    "model:qwen3-next-two-of-four-experts",
    "model:qwen3-next-no-experts",
    "model:qwen3.5-biases",
    "model:qwen4-exp-two-of-four-experts",
    "model:qwen3.5-moe-two-of-three-experts",
    "model:recurrent-gemma",
    "model:rwkv",
    "model:rwkv7",
    "model:xlstm",
    "model:zamba",
    "model:zamba2",
    "model:zaya",
)
"""Models, and how their memories fold: "keep" unless named; or that everything is in bfloat16, or weights in int8."""

IS_FULL = os.environ.get("CONFORMANCE") == "full"
"""Whether products of parameters run whole, for an hour; else a part of them, which `tests/conformance/conftest.py`
chooses.
"""

# Combine every policy with every storage, on a hybrid and on attention alone.
if IS_FULL or os.environ.get("CONFORMANCE") == "kinds":
    pairs = itertools.product(("toy", "toy-attention"), POLICIES, ("", *(f"-{storage}" for storage in STORAGES)))
    SUBJECTS = tuple(dict.fromkeys((*SUBJECTS, *(f"{toy}-{policy}{storage}" for toy, policy, storage in pairs))))


@dataclass(frozen=True)
class Subject:
    """Holds a model, how its memories fold, and whether equal steps must give equal bits after a replay."""

    name: str
    fold: Literal["keep", "replay", "defer"]
    model: LanguageModel
    is_exact: bool
    policy: Budget | None = None
    storage: Storage | None = None
    _oracles: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def spec(self) -> MemorySpec:
        return self.model.memory_spec.with_policy(self.policy).with_storage(self.storage)

    @property
    def reaches_everything(self) -> bool:
        """True if a rollback reaches every position: only attention remembers, and it sees everything."""
        attention = [memory for layer in self.spec.layers for memory in layer if isinstance(memory, AttentionSpec)]
        forgets = any(
            m.window is not None or isinstance(m.policy, EvictionPolicy) or m.storage is not None for m in attention
        )
        return not forgets and len(attention) == sum(map(len, self.spec.layers))

    @property
    def is_lossy(self) -> bool:
        """True if old rows are dropped or rounded. Then outputs depend on how tokens were split into steps."""
        return self.storage is not None or (isinstance(self.policy, EvictionPolicy) and self.policy.budget_tokens < 512)

    @property
    def page_tokens(self) -> int:
        """Return the usual page size, or one that suits small budgets and divides the small groups of storages."""
        return 16 if self.storage is None and not isinstance(self.policy, Quest) else 4

    def memory(
        self, rollback_window: int = 8, budget: int | str = "2MiB", page_tokens: int = 4, **others: Any
    ) -> HybridMemory:
        options: dict[str, Any] = {"rollback_window": rollback_window, "page_tokens": page_tokens, "fold": self.fold}
        return HybridMemory(self.spec, budget, **options, **others, poison=True)

    def tokens(self, n_tokens: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.model.memory_spec.vocab_size, (n_tokens,), generator=generator).tolist()

    def feed(self, memory: HybridMemory, sequence: Sequence, steps: Iterable[list[int]]) -> Tensor:
        """Feed steps one after the other. Return the logits of all tokens, (n, vocab)."""
        logits = []
        for tokens in steps:
            with memory.step({sequence: tokens}, outputs="all") as step:
                logits.append(self.model(step))
            memory.check()
        return torch.cat(logits)

    def feed_together(
        self, memory: HybridMemory, requests: Mapping[Sequence, StepsOf[list[int]]]
    ) -> dict[Sequence, Tensor]:
        return feed_together(self.model, memory, requests)

    def fresh(self, steps: list[list[int]], rollback_window: int = 8) -> Tensor:
        """Return logits of a sequence that saw only these steps, in a memory of its own.

        They are computed once, because many tests ask for the same ones.
        """
        asked = repr((steps, rollback_window))
        if asked not in self._oracles:
            memory = self.memory(rollback_window)
            self._oracles[asked] = self.feed(memory, memory.open(), steps)
        return self._oracles[asked].clone()

    def cut(self, steps: list[list[int]]) -> list[list[int]]:
        """Return all tokens as one step if the split into steps makes no difference.

        It makes a difference where a step sees a body as it was before the step.
        """
        return steps if self.is_lossy else [[token for tokens in steps for token in tokens]]

    def assert_same(self, actual: Tensor, expected: Tensor, *, bits: bool = False) -> None:
        """Assert equal bits if `bits` is set and the model can promise that, and equality up to rounding otherwise."""
        assert actual.shape == expected.shape
        assert torch.isfinite(actual).all(), "memory that nobody wrote was read"
        if bits and self.is_exact:
            assert torch.equal(actual, expected), f"bits differ: {(actual - expected).abs().max()}"
        spread = float(expected.max() - expected.min())
        worst = float((actual - expected).abs().max())
        allowed = TOLERANCE[self.model.memory_spec.dtype].replay * spread
        assert worst <= allowed, f"{worst} is more than {allowed}"


def feed_together(
    model: LanguageModel, memory: HybridMemory, requests: Mapping[Sequence, StepsOf[list[int]]]
) -> dict[Sequence, Tensor]:
    """Feed several sequences. The n-th step feeds the n-th part of each.

    Return the logits of the tokens of each sequence.
    """
    logits: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in requests}
    for n in range(max(map(len, requests.values()), default=0)):
        chosen = {sequence: steps[n] for sequence, steps in requests.items() if n < len(steps)}
        with memory.step(chosen, outputs="all") as step:
            for sequence, rows in zip(chosen, step.split(model(step)), strict=True):
                logits[sequence].append(rows)
        memory.check()
    return {sequence: torch.cat(rows) for sequence, rows in logits.items() if rows}


def make_subject(name: str, folder: Path, device: torch.device = HOST, dtype: torch.dtype = torch.float32) -> Subject:
    name, _, fold = name.partition(" ")
    if fold == "bfloat16":
        fold, dtype = "", torch.bfloat16
    if name.startswith("family:"):
        family = FAMILIES[name.removeprefix("family:")]
        # A GPU runs many tokens as products of matrices, and few tokens one by one.
        is_exact = family.is_exact and device == HOST
        return Subject(name, fold or "keep", FamilyToy(family, device), is_exact=is_exact)  # type: ignore[arg-type]
    if name.startswith("model:"):
        checkpoints.write_checkpoint(folder, checkpoints.CONFIGS[name.removeprefix("model:")]())
        return Subject(name, fold or "keep", load_model(folder, device=device, dtype=dtype), is_exact=False)  # type: ignore[arg-type]
    if name.startswith("toy"):
        window = 5 if name == "toy-window" else None
        model = Toy(
            attention=name != "toy-recurrent",
            recurrent="attention" not in name,
            window=window,
            dtype=dtype,
            device=device,
        )
        policy = next((policy for label, policy in POLICIES.items() if f"-{label}" in name), None)
        storage = next((storage for label, storage in STORAGES.items() if label in name), None)
        return Subject(name, fold or "keep", model, is_exact=True, policy=policy, storage=storage)  # type: ignore[arg-type]
    torch.manual_seed(1)
    write_checkpoint(name, folder)
    fold, weights = ("", "int8") if fold == "int8" else (fold, "auto")
    model = load_model(folder, device=device, dtype=dtype, weights=weights)  # type: ignore[arg-type]
    return Subject(name, fold or "keep", model, is_exact=False)  # type: ignore[arg-type]


def write_checkpoint(name: str, folder: Path) -> None:
    """Write a small random checkpoint, with weights so large that states matter."""
    if name == "jamba":
        config = JambaConfig(
            vocab_size=53, hidden_size=24, intermediate_size=32, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
            expert_layer_offset=1, num_experts=3, num_experts_per_tok=3, mamba_d_state=5, mamba_d_conv=4,
            mamba_dt_rank=3,
        )  # fmt: skip
        hf: torch.nn.Module = JambaForCausalLM(config)
    else:
        hf = MambaForCausalLM(
            MambaConfig(vocab_size=53, hidden_size=24, num_hidden_layers=3, state_size=5, conv_kernel=3)
        )
    with torch.no_grad():
        for parameter_name, parameter in hf.named_parameters():
            if parameter.dim() >= 2 and "A_log" not in parameter_name:
                parameter.normal_(std=0.25 if "embed" not in parameter_name else 1.0)
    hf.save_pretrained(folder)  # type: ignore[operator]
