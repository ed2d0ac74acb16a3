"""Makes configs with fields that none of our checkpoints has, and judges what the library makes of them."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    MiniCPMV4_6Config,
    MiniCPMV4_7Config,
    NemotronH_Omni_Reasoning_V3_Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen4ExpConfig,
)

from hybridmem.memory import BatchError, HybridMemory
from hybridmem.memory.errors import HybridMemoryError
from hybridmem.models import from_transformers
from tests.models import checkpoints, test_encoder_decoder
from tests.models.checkpoints import draw_tokens, randomise_
from tests.models.families.nemotron_h import nemotron_config
from tests.models.families.qwen3_5 import EYES, qwen3_5_config, qwen3_5_moe_config
from tests.models.families.qwen4_exp import qwen4_exp_config
from tests.models.seeing import CANVAS_EYES, MARKS, RADIO_EYES

Path = tuple[str, ...]
"""Where a field is in config.json."""
Changes = dict[Path, Any]

SUBJECTS: dict[str, Callable[[], PreTrainedConfig]] = {
    # Transformers does not know this family.
    **{name: config for name, config in checkpoints.CONFIGS.items() if not name.startswith("rwkv7")},
    **test_encoder_decoder.CONFIGS,
    "qwen3.5-that-sees": lambda: Qwen3_5Config(text_config=qwen3_5_config().to_dict(), vision_config=EYES),
    "qwen4-exp-that-sees": lambda: Qwen4ExpConfig(text_config=qwen4_exp_config().to_dict(), vision_config=EYES),
    "qwen3.5-moe-that-sees": lambda: Qwen3_5MoeConfig(
        text_config=qwen3_5_moe_config().to_dict(), vision_config=EYES
    ),
    "nemotron-h-that-sees": lambda: NemotronH_Omni_Reasoning_V3_Config(
        text_config=nemotron_config().to_dict(), vision_config=RADIO_EYES, vision_hidden_size=16, image_token_id=3
    ),
    "minicpm-v-4.6": lambda: MiniCPMV4_6Config(
        text_config=qwen3_5_config().to_dict(), vision_config=CANVAS_EYES, insert_layer_id=1, image_token_id=3
    ),
    "minicpm-v": lambda: MiniCPMV4_7Config(
        text_config=qwen3_5_config().to_dict(), vision_config=CANVAS_EYES, insert_layer_id=1, image_token_id=3, **MARKS
    ),
}  # fmt: skip

ABSENT = object()
"""Of a field: it is left out."""

_NOT_OPTIONS = {
    "architectures", "model_type", "transformers_version", "_name_or_path", "id2label", "label2id", "vision_config",
    "dtype",  # `load_model` chooses how numbers are stored.
    # This limits how many tokens xLSTM takes at once. With few of them, transformers rounds its states in between; with
    # 0, it never ends.
    "max_inference_chunksize",
    # This says into how many parts Qwen4-Exp's files are cut. They load with any number, and transformers cannot write
    # them with 0.
    "split_ngram_parts",
    # Ids from this one on are no tokens. The model refuses them, and transformers embeds them.
    "unpadded_vocab_size",
}  # fmt: skip
_WORDS = (
    "relu", "gelu", "silu", "gelu_pytorch_tanh", "relu2", "no-such-word", "default", "linear", "llama3", "yarn",
    "dynamic", "longrope", "proportional", "full_attention", "sliding_attention", "linear_attention", "conv", "moe",
    "mlp", "attention", "recurrent", "rope", "nope", "alibi", "greedy", "group_limited_greedy", "noaux_tc", "softmax",
    "sigmoid", "gated-gelu", "gated-silu",
)  # fmt: skip
_ROPE = {
    "rope_type": ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional", "no-such-word"),
    "rope_theta": (7.0, 1e6), "partial_rotary_factor": (0.25, 0.5, 1.0, 2.0, 0.0), "factor": (1.0, 4.0, 0.5),
    "attention_factor": (0.7,), "mscale": (0.7,), "mscale_all_dim": (1.3, 0.0), "beta_fast": (16,), "beta_slow": (2,),
    "low_freq_factor": (1.0,), "high_freq_factor": (4.0,), "original_max_position_embeddings": (16,),
    "truncate": (False,), "mrope_section": ([1, 1, 1],), "mrope_interleaved": (True, False),
}  # fmt: skip
_SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "proportional"},
)  # fmt: skip


def class_of(subject: str) -> str:
    return type(SUBJECTS[subject]()).__name__


def fields_of(raw: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    """Return all fields of a config, and of the configs inside it."""
    for name, value in raw.items():
        if name in _NOT_OPTIONS:
            continue
        yield (*path, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*path, name))


def at(raw: dict[str, Any], path: Path) -> Any:
    for name in path:
        raw = raw[name]
    return raw


def values_for(path: Path, value: Any) -> list[Any]:
    """Return other values of a field, sensible and not."""
    name = path[-1]
    if len(path) > 1 and name in _ROPE:
        return [ABSENT, *_ROPE[name]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        # With few heads of an index many rows have the score 0; of these, transformers chooses any. A layer norm of one
        # or two numbers makes many keys equal.
        least = 3 if name in ("index_n_heads", "indexer_n_heads") else 4 if name == "index_head_dim" else -1
        return [
            n
            for n in (0, 1, 2, value - 1, value + 1, 2 * value, 3 * value, value // 2, -1)
            if n != value and n >= least
        ] + [None]
    if isinstance(value, float):
        return [x for x in (0.0, 0.1, 0.5 * value, 1.0, 2.0 * value, -value, 3) if x != value] + [None]
    if isinstance(value, str):
        return [*_WORDS, None]
    if isinstance(value, list | tuple):
        lists: list[Any] = [value[::-1], value[:-1], [*value, *value[-1:]], None]
        for i, element in enumerate(value):
            lists += [
                [*value[:i], other, *value[i + 1 :]]
                for other in values_for((*path, str(i)), element)
                if other is not ABSENT
            ]
        return lists
    if isinstance(value, dict):  # Without its text config, a model would be as large as the published one.
        return [ABSENT, *(value | scaling for scaling in _SCALINGS)] if "rope" in name else []
    return [True, False, 0, 1, 3, 0.0, 0.3, *_WORDS[:4]]


def single_changes(subject: str) -> Iterator[Changes]:
    """Change each field of a config on its own, to each of its other values."""
    raw = SUBJECTS[subject]().to_dict()
    for path in fields_of(raw):
        for value in values_for(path, at(raw, path)):
            yield {path: value}
    for path in [path for path in fields_of(raw) if path[-1] == "rope_parameters"]:
        parameters = at(raw, path)
        for place in [path] if "rope_theta" in parameters else [(*path, kind) for kind in parameters]:
            absent = _ROPE.keys() - at(raw, place).keys()
            yield from ({(*place, name): value} for name in sorted(absent) for value in _ROPE[name])
            for scaling in _SCALINGS:
                for more in ({}, {"partial_rotary_factor": 0.5}):
                    yield {(*place, name): value for name, value in (scaling | more).items()}


def foreign_changes(subject: str, n_at_once: int = 5) -> Iterator[Changes]:
    """Add fields of other classes. Code may read such a field even if a class does not have it."""
    own = SUBJECTS[subject]().to_dict()
    others: dict[str, Any] = {
        "partial_rotary_factor": 0.5,
        "rope_theta": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    for other in SUBJECTS:
        others |= {
            name: value
            for name, value in SUBJECTS[other]().to_dict().items()
            if name not in _NOT_OPTIONS and value is not None
        }
    names = sorted(name for name in others if name not in own)
    for start in range(0, len(names), n_at_once):
        yield {(name,): others[name] for name in names[start : start + n_at_once]}


def random_changes(subject: str, generator: random.Random) -> Changes:
    """Change two to four fields at once."""
    by_path: dict[frozenset[Path], list[Changes]] = {}
    for changes in single_changes(subject):
        by_path.setdefault(frozenset(changes), []).append(changes)
    found: Changes = {}
    for path in generator.sample(sorted(by_path, key=sorted), min(len(by_path), generator.randint(2, 4))):
        found |= generator.choice(by_path[path])
    return found


def mutated(subject: str, changes: Changes) -> PreTrainedConfig:
    """Return the config that transformers reads from such a config.json. Raises whatever transformers raises."""
    base = SUBJECTS[subject]()
    raw = copy.deepcopy(base.to_dict())
    for path, value in changes.items():
        inner = raw
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        if value is ABSENT:
            inner.pop(path[-1], None)
        else:
            inner[path[-1]] = copy.deepcopy(value)
    return type(base).from_dict(raw)


@dataclass(frozen=True)
class Verdict:
    """What came of a mutation.

    Attributes:
        kind: "impossible" for transformers, "equal", "refused", or "wrong", which is all that must not be.
    """

    kind: str
    why: str = ""


def judge(subject: str, changes: Changes) -> Verdict:
    """Build the model with transformers.

    Ours must give its logits, or refuse at load and name one of the fields or its value.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            peer = _make_peer(subject, mutated(subject, changes))
        except Exception as error:
            return Verdict("impossible", f"{type(error).__name__}: {error}")
        expected, reason = _try(lambda: _peer_logits(peer))
        if expected is not None and not expected.isfinite().all():
            expected, reason = None, "transformers gives NaN or infinity"
        try:
            model = from_transformers(peer)
        except HybridMemoryError as error:
            if any(name in str(error) for name in _names(changes)):
                return Verdict("refused", str(error))
            if "cannot write" in str(error):  # Transformers writes no file of it, so none can be loaded.
                return Verdict("impossible", str(error))
            return Verdict("impossible" if expected is None else "wrong", f"refused without a name: {error}")
        except Exception as error:
            return Verdict("wrong", f"not refused, but: {type(error).__name__}: {error}")
        try:
            actual = _own_logits(model, peer)
        except BatchError as error:  # The model does not take so many tokens.
            return Verdict("impossible" if expected is None else "wrong", str(error))
        except Exception as error:
            return Verdict("wrong", f"loaded, but the first step raises {type(error).__name__}: {error}")
    if expected is None:
        return Verdict("impossible", reason)
    std = max(float(expected.std()), 1e-3)
    worst = float((actual - expected).abs().nan_to_num(torch.inf).max()) / std
    return Verdict(
        "equal" if worst < _TOLERANCE else "wrong", f"logits off by {worst:.2g} of their std, which is {std:.2g}"
    )


def _try(run: Callable[[], Tensor]) -> tuple[Tensor | None, str]:
    try:
        return run(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _names(changes: Changes) -> Iterator[str]:
    """Return what a refusal may name: a changed field, a field inside it, or the value of either."""
    for path, value in changes.items():
        yield from path
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from value if isinstance(value, dict) else ()
        yield from (repr(part) for part in parts if isinstance(part, str))


_TOLERANCE = 1e-2
"""Of the logits' std: numbers that a mutation makes large round as much, and a field that is read otherwise gives far
more.
"""
_N_PROMPT, _N_TOKENS = 18, 22
"""The CPU's kernels take prompts of up to 16 tokens for decodes."""


_WITH_ENCODERS = ("bart", "t5")


def _make_peer(subject: str, config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(5)
    base = SUBJECTS[subject]()
    is_seeing = hasattr(base, "vision_config")
    auto = (
        AutoModelForSeq2SeqLM
        if base.is_encoder_decoder
        else AutoModelForImageTextToText
        if is_seeing
        else AutoModelForCausalLM
    )
    peer: PreTrainedModel = auto.from_config(config, attn_implementation="eager").eval()
    randomise_(peer)
    if config.model_type == "t5":
        peer.shared.weight.data.normal_(0, 2.0)
    return peer


def _tokens(config: PreTrainedConfig) -> list[int]:
    return [token % config.get_text_config().vocab_size for token in draw_tokens(_N_TOKENS)]


@torch.no_grad()
def _peer_logits(peer: PreTrainedModel) -> Tensor:
    tokens = torch.tensor([_tokens(peer.config)])
    if peer.config.model_type in _WITH_ENCODERS:
        return peer(tokens[:, :5], decoder_input_ids=tokens, use_cache=False, return_dict=True).logits[0]
    return peer(tokens, use_cache=False, return_dict=True).logits[0].float()


def _own_logits(model: Any, peer: PreTrainedModel) -> Tensor:
    tokens = _tokens(peer.config)
    memory = HybridMemory(model.memory_spec, "8MiB", page_tokens=4, rollback_window=4)
    sequence = memory.open(encoder=model.encode([tokens[:5]])[0]) if hasattr(model, "encode") else memory.open()
    parts = []
    for part in (tokens[:_N_PROMPT], tokens[_N_PROMPT:-1], tokens[-1:]):
        with memory.step({sequence: part}, outputs="all") as step:
            parts.append(model(step))
    return torch.cat(parts).float()
