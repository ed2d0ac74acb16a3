"""Names the classes of transformers models that `attach` accepts, and how their forwards want to be called."""

from __future__ import annotations

ATTACHABLE = (
    "BailingHybridForCausalLM",
    "BambaForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm5NextForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Inkling2ForCausalLM",
    "Inkling2LoopForCausalLM",
    "InklingForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "LaraMiniForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniMaxForCausalLM",
    "MistralForCausalLM",
    "NemotronHForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen4ExpForCausalLM",
    "RecurrentGemmaForCausalLM",
    "RwkvForCausalLM",
    "Zamba2ForCausalLM",
    "ZambaForCausalLM",
    "ZayaForCausalLM",
    "xLSTMForCausalLM",
)
"""Classes of transformers models that `attach` accepts."""

NOT_ATTACHED = {"RWKV7ForCausalLM": "transformers has no such class"}
"""Classes that `load_model` loads and `attach` refuses, and why."""

TAKE_NO_OTHER_CACHE = ("MiniMaxForCausalLM",)
"""Classes that refuse a cache of another class. If they are told to use none, they pass the cache on all the same."""

RUN_WITHOUT_CACHE = (
    "DeepseekV32ForCausalLM",
    "Glm5NextForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "Inkling2ForCausalLM",
    "Inkling2LoopForCausalLM",
    "InklingForCausalLM",
    "Qwen4ExpForCausalLM",
    "RwkvForCausalLM",
    "xLSTMForCausalLM",
)
"""Classes that run without a cache and a mask, because each of their modules that remembers is replaced as a whole.

They would read what only their own class of cache has. Their outputs name the given cache.
"""
