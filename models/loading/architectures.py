"""Lists the architectures that can be loaded, each with its module, which is imported when the architecture is used.

Every module needs the config class of its architecture, and importing all of these from transformers takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from hybridmem.memory import MemorySpec, Step
from hybridmem.models.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LanguageModel(Protocol):
    """Holds the weights of a model that runs on a memory. Everything that it remembers is in the step's memory."""

    config: PreTrainedConfig
    memory_spec: MemorySpec

    def __call__(self, step: Step) -> Tensor:
        """Return the logits of the rows that the step selects, (n, vocab), in the caller's order.

        Models of this library return float32, and float64 if their weights are float64.
        """
        ...


ModelClass = Callable[[Any, Checkpoint], LanguageModel]

_MODULES = {
    "BailingHybridForCausalLM": "hybridmem.models.families.bailing_hybrid",
    "BambaForCausalLM": "hybridmem.models.families.bamba",
    "BartForConditionalGeneration": "hybridmem.models.families.bart",
    "DeepseekV2ForCausalLM": "hybridmem.models.families.deepseek",
    "DeepseekV3ForCausalLM": "hybridmem.models.families.deepseek",
    "DeepseekV32ForCausalLM": "hybridmem.models.families.deepseek_v32",
    "FalconH1ForCausalLM": "hybridmem.models.families.falcon_h1",
    "FalconMambaForCausalLM": "hybridmem.models.families.mamba",
    "Gemma2ForCausalLM": "hybridmem.models.families.gemma",
    "Gemma3ForCausalLM": "hybridmem.models.families.gemma",
    "Glm5NextForConditionalGeneration": "hybridmem.models.families.glm5_next",
    "GlmMoeDsaForCausalLM": "hybridmem.models.families.deepseek_v32",
    "GptOssForCausalLM": "hybridmem.models.families.gpt_oss",
    "GraniteMoeHybridForCausalLM": "hybridmem.models.families.granite_moe_hybrid",
    "Inkling2ForCausalLM": "hybridmem.models.families.inkling2",
    "Inkling2LoopForCausalLM": "hybridmem.models.families.inkling2_loop",
    "InklingForCausalLM": "hybridmem.models.families.inkling",
    "JambaForCausalLM": "hybridmem.models.families.jamba",
    "LaraMiniForCausalLM": "hybridmem.models.families.lara_mini",
    "Lfm2ForCausalLM": "hybridmem.models.families.lfm2",
    "Lfm2MoeForCausalLM": "hybridmem.models.families.lfm2",
    "Lfm2VlForConditionalGeneration": "hybridmem.models.families.lfm2",
    "KimiLinearForCausalLM": "hybridmem.models.families.kimi_linear",
    "Lfm3ForCausalLM": "hybridmem.models.families.lfm3",
    "Lfm3VlForConditionalGeneration": "hybridmem.models.families.lfm3",
    "LlamaForCausalLM": "hybridmem.models.families.llama",
    "Mamba2ForCausalLM": "hybridmem.models.families.mamba",
    "MambaForCausalLM": "hybridmem.models.families.mamba",
    "MiniCPMV4_6ForConditionalGeneration": "hybridmem.models.families.qwen3_5",
    "MiniCPMV4_7ForConditionalGeneration": "hybridmem.models.families.qwen3_5",
    "MiniMaxForCausalLM": "hybridmem.models.families.minimax",
    "MistralForCausalLM": "hybridmem.models.families.llama",
    "NemotronHForCausalLM": "hybridmem.models.families.nemotron_h",
    "NemotronH_Omni_Reasoning_V3": "hybridmem.models.families.nemotron_h",
    "Olmo3ForCausalLM": "hybridmem.models.families.olmo3",
    "OlmoHybridForCausalLM": "hybridmem.models.families.olmo_hybrid",
    "Qwen2ForCausalLM": "hybridmem.models.families.llama",
    "Qwen3ForCausalLM": "hybridmem.models.families.llama",
    "Qwen3NextForCausalLM": "hybridmem.models.families.qwen3_next",
    "Qwen4ExpForCausalLM": "hybridmem.models.families.qwen4_exp",
    "Qwen4ExpForConditionalGeneration": "hybridmem.models.families.qwen4_exp",
    "Qwen3_5ForCausalLM": "hybridmem.models.families.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "hybridmem.models.families.qwen3_5",
    "Qwen3_5MoeForCausalLM": "hybridmem.models.families.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "hybridmem.models.families.qwen3_5",
    "RWKV7ForCausalLM": "hybridmem.models.families.rwkv7",
    "RecurrentGemmaForCausalLM": "hybridmem.models.families.recurrent_gemma",
    "RwkvForCausalLM": "hybridmem.models.families.rwkv",
    "T5ForConditionalGeneration": "hybridmem.models.families.t5",
    "ZambaForCausalLM": "hybridmem.models.families.zamba",
    "Zamba2ForCausalLM": "hybridmem.models.families.zamba2",
    "ZayaForCausalLM": "hybridmem.models.families.zaya",
    "xLSTMForCausalLM": "hybridmem.models.families.xlstm",
}

REFUSED: dict[str, str] = {
    "Inkling2ForConditionalGeneration": (
        "its tower for pictures is not implemented; its language model loads as Inkling2ForCausalLM"
    ),
    "Inkling2LoopForConditionalGeneration": (
        "its tower for pictures is not implemented; its language model loads as Inkling2LoopForCausalLM"
    ),
    "InklingForConditionalGeneration": (
        "its towers for pictures and sounds are not implemented; its language model loads as InklingForCausalLM"
    ),
    "MiniCPMOcrForConditionalGeneration": (
        "its tower for pictures is not implemented; its language model loads as Qwen3_5ForCausalLM"
    ),
    "Nemotron3_5TranscribeForConditionalGeneration": (
        "its tower for sounds is not implemented; its language model loads as NemotronHForCausalLM"
    ),
}
"""Maps a class of transformers with recurrent states that is not implemented to the reason why."""


class Architectures(Mapping[str, ModelClass]):
    """Maps names of architectures, as they are in config.json, to model classes."""

    def __init__(self) -> None:
        self._classes: dict[str, ModelClass] = {}

    def __getitem__(self, architecture: str) -> ModelClass:
        if architecture not in self._classes:
            import_module(_MODULES[architecture])
        return self._classes[architecture]

    def __contains__(self, architecture: object) -> bool:
        return architecture in self._classes or architecture in _MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES | self._classes)

    def __len__(self) -> int:
        return len(_MODULES | self._classes)

    def add(self, architecture: str, model_class: ModelClass) -> None:
        """Let this class implement the architecture, in place of an earlier class if there was one."""
        self._classes[architecture] = model_class


ARCHITECTURES = Architectures()
C = TypeVar("C", bound=type)


def register(architecture: str) -> Callable[[C], C]:
    """Register the decorated class as the one that `config.json` names `architecture`."""

    def add(model_class: C) -> C:
        ARCHITECTURES.add(architecture, model_class)
        return model_class

    return add
