"""The two 120M-parameter models that are measured, ours and transformers' with the same random weights, and what they do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from memory import HybridMemory, Sequence
from memory.recurrences import SSD, DeltaRule, Mamba1
from models import LanguageModel, load_model

VOCAB = 32_000
_COMMON = {"vocab_size": VOCAB, "hidden_size": 768, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MODELS = ("jamba", "mamba")


def make_peer(name: str) -> PreTrainedModel:
    """Jamba: 12 layers, attention at 2, 6 and 10, one expert. Mamba: 24 layers. transformers' own random weights."""
    torch.manual_seed(0)
    if name == "jamba":
        return JambaForCausalLM(
            JambaConfig(
                **_COMMON,
                num_hidden_layers=12,
                num_attention_heads=12,
                num_key_value_heads=4,
                intermediate_size=2048,
                attn_layer_period=4,
                attn_layer_offset=2,
                expert_layer_period=2,
                expert_layer_offset=1,
                num_experts=1,
                num_experts_per_tok=1,
                mamba_d_state=16,
                mamba_d_conv=4,
                mamba_expand=2,
            )
        ).eval()
    return MambaForCausalLM(MambaConfig(**_COMMON, num_hidden_layers=24, state_size=16)).eval()


@contextmanager
def both_models(name: str) -> Iterator[tuple[LanguageModel, PreTrainedModel]]:
    """Ours, loaded from what transformers saved, and transformers'."""
    peer = make_peer(name)
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        yield load_model(folder, progress=False), peer


def draw(n_sequences: int, n_tokens: int) -> Tensor:
    return torch.randint(0, VOCAB, (n_sequences, n_tokens), generator=torch.Generator().manual_seed(1))


class Ours:
    """Sequences of one memory, prefilled or stepped together."""

    def __init__(self, model: LanguageModel, n_sequences: int, *, rollback_window: int = 32, budget: str = "6GiB") -> None:
        self.model = model
        self.memory = HybridMemory(model.memory_spec, budget, rollback_window=rollback_window)
        self.sequences: list[Sequence] = [self.memory.open() for _ in range(n_sequences)]
        self.next = [5] * n_sequences

    def prefill(self, tokens: Tensor) -> None:
        for sequence in self.sequences:
            self.memory.rollback(sequence, to=0)
        with self.memory.step(zip(self.sequences, tokens, strict=True)) as step:
            self.model(step)

    def fill(self, tokens: Tensor) -> None:
        """As `prefill`, of any length."""
        self.memory.run(self.model, zip(self.sequences, tokens, strict=True), max_tokens=2048)

    def decode(self) -> None:
        with self.memory.step(zip(self.sequences, self.next, strict=True)) as step:
            logits = self.model(step)
        self.next = logits.argmax(-1).tolist()


class Transformers:
    """The same in transformers: a forward loop with its cache object, greedy, only the last logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache_name = "cache_params" if model.config.model_type == "mamba" else "past_key_values"
        self._cache = DynamicCache(config=model.config)
        self._next = torch.empty(0)

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> None:
        self._cache = DynamicCache(config=self.model.config)
        self._length = 0
        self._forward(tokens)

    def decode(self) -> None:
        self._forward(self._next)

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> None:
        options = {self._cache_name: self._cache, "use_cache": True, "logits_to_keep": 1}
        if self._cache_name == "past_key_values":
            positions = torch.arange(self._length, self._length + tokens.shape[1])
            options["position_ids"] = positions[None].expand(len(tokens), -1)
        logits = self.model(tokens, **options).logits[:, -1]
        self._length += tokens.shape[1]
        self._next = logits.argmax(-1)[:, None]


@dataclass
class Mixerless:
    """A step that remembers nothing: what is left of a model is its matrix products, norms and gates. The ceiling of a real step."""

    token_ids: Tensor

    def check_model(self, spec: object) -> None: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, name: str | None = None) -> Tensor:
        return q

    def recur(self, layer: int, rows: Tensor, recurrence: object, *, name: str | None = None) -> Tensor:
        if isinstance(recurrence, Mamba1):
            recurrence.project(rows)
        if isinstance(recurrence, SSD):
            return rows[:, : recurrence.shape.n_inner]
        if isinstance(recurrence, DeltaRule):
            return rows[:, : recurrence.shape.n_heads * recurrence.shape.value_dim]
        return rows

    def select(self, hidden: Tensor) -> Tensor:
        return hidden
