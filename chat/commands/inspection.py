"""Finds out what a file is, what it holds and whether it is whole.

It knows saved sequences and chats, saved prefix caches, a server's sessions, checkpoints of models, and their configs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from hybridmem.chat.commands.inspected_sessions import read_sessions
from hybridmem.chat.commands.inspected_trees import Branch, branches_of, members_of, prefixes_in
from hybridmem.chat.engine.context import named_context_tokens
from hybridmem.chat.session.saved import SESSION_FILE, read_about
from hybridmem.chat.stored.database import FILE, PREFIXES
from hybridmem.memory import AttentionSpec, FormatError, MemorySpec, RecurrentSpec
from hybridmem.memory.storage import CHECKPOINTS_FILE, read_blocks, read_family
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.loading.draft_heads import folder_beside
from hybridmem.models.loading.dry import DryCheckpoint, find_files
from hybridmem.models.loading.folders import EMBEDDED, read_config
from hybridmem.models.loading.gguf import GgufFile, find_gguf, is_gguf
from hybridmem.models.loading.load import build, dry_model, open_model, weight_bytes
from hybridmem.models.loading.quantised_checkpoints import find_coding
from hybridmem.models.products.choice import Kind, noting_kinds, numbers_by_name
from hybridmem.models.weights.checkpoint import Checkpoint, UnreadCheckpoint, UnsupportedModelError
from hybridmem.models.weights.formats import WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_TENSORS = 8
_EMBEDDED = Path("embedded")
"""The name by which commands know the model that ships with the library."""
_TAKEN = "yes: load_model(draft_head=True) and --draft-head auto take it"
_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BOOL": 8, "U8": 8, "I8": 8, "F4": 4}
"""The bits of each dtype, by its name in safetensors. Names that are missing here end in the number of bits, 8 or 16.
"""


@dataclass(frozen=True)
class Stored:
    """Describes a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class Finding:
    """Describes what a file holds.

    Attributes:
        kind: "saved sequence", "saved chat", "saved prefix cache", "server's sessions", "model" or "config".
        is_verified: whether all checksums are right. None if the file has no checksums.
        facts: name -> value of each fact, in the order in which they are shown.
        by_kind: the bytes of each kind of memory.
        largest: the largest tensors, `MOST_TENSORS` at most, in descending order.
        tree: which sequence grew from which, in a file that holds several.
        parts: the files that belong to the finding.
    """

    kind: str
    path: str
    is_verified: bool | None
    facts: dict[str, Any]
    by_kind: dict[str, int] = field(default_factory=dict)
    largest: tuple[Stored, ...] = ()
    tree: tuple[Branch, ...] = ()
    parts: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the finding as values that JSON can hold."""
        return asdict(self)


def inspect_path(path: Path) -> Finding:
    """Inspect a file or folder.

    Raises FormatError if nothing is there, if the kind is unknown, or if it is damaged.
    """
    path = path.expanduser()
    if path == _EMBEDDED and not path.exists():
        path = EMBEDDED
    if path.is_dir():
        if (path / SESSION_FILE).exists():
            return _inspect_chat(path)
        if (path / "config.json").exists():
            return _inspect_model(path)
        if (path / CHECKPOINTS_FILE).exists():
            return _inspect_prefixes(path)
        if (path / FILE).exists():
            return _inspect_sessions(path)
        if (model := find_gguf(path)) is not None:
            return _inspect_gguf(model)
        raise FormatError(
            f"{path} holds no {SESSION_FILE}, config.json, {CHECKPOINTS_FILE}, {FILE} or GGUF file; give a saved "
            "sequence, a saved chat, the folder of a prefix cache or of a server's sessions, or a model's folder or "
            "GGUF file"
        )
    if not path.exists():
        raise FormatError(f"there is no {path}; give a saved sequence, a saved chat, or a model's folder or GGUF file")
    if path.name == CHECKPOINTS_FILE:
        return _inspect_prefixes(path.parent)
    if path.name == SESSION_FILE:
        return _inspect_chat(path.parent)
    if path.suffix == ".json":
        return _inspect_model(path)
    return _inspect_gguf(path) if is_gguf(path) else _inspect_sequence(path)


def _inspect_sequence(path: Path) -> Finding:
    saved = read_family(str(path))  # This call also compares the checksums.
    first, about, stored = saved.members[0], saved.about, {pool: own for pool, (own,) in saved.blocks.items()}
    try:
        facts = {
            "format": f"hybrid-memory sequence, version {about['version']}", "model": str(about.get("model")),
            "tokens": first.length, "furthest position": first.peak,
            "dropped before": [position for position, _ in first.drops], **_signature_facts(about),
            "positions": dict(first.held.records),
        }  # fmt: skip
        by_kind = {"tokens": sum(int(tokens.nbytes) for tokens in saved.tokens)}
        for name, blocks in stored.items():
            role = str(name).rpartition("/")[2]
            by_kind[role] = by_kind.get(role, 0) + int(blocks.nbytes)
        tensors = [
            Stored(str(n), str(b.dtype).removeprefix("torch."), tuple(b.shape), int(b.nbytes))
            for n, b in stored.items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(f"{path} contradicts itself ({error!r}); save the sequence again") from error
    tree = members_of(saved) if len(saved.members) + len(saved.damaged) > 1 else ()
    return Finding("saved sequence", str(path), not saved.damaged, facts, by_kind, _largest(tensors), tree)


def _signature_facts(about: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that a file states about the memory that wrote it, and about the weights."""
    signature = dict(about["signature"])
    if isinstance(layers := signature.get("layers"), list):
        signature["layers"] = len(layers)
    weights = {} if about.get("weights") is None else {"weights": str(about["weights"])}
    return {**{str(name).replace("_", " "): value for name, value in signature.items()}, **weights}


def _inspect_prefixes(folder: Path) -> Finding:
    path = folder / CHECKPOINTS_FILE
    _, about = read_blocks(str(path))  # This call also compares the checksum.
    try:
        tree = prefixes_in(folder, about)
        facts = {
            "format": f"hybrid-memory prefixes, version {about['version']}", "model": str(about.get("model")),
            "checkpoints": len(tree), "tokens": int(about["tokens"].size), **_signature_facts(about),
            "files that are gone": sum(branch.n_bytes is None for branch in tree),
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise FormatError(f"{path} contradicts itself ({error!r}); save the checkpoints again") from error
    by_kind = {"tokens": int(about["tokens"].nbytes), "blocks": sum(branch.n_bytes or 0 for branch in tree)}
    return Finding("saved prefix cache", str(folder), True, facts, by_kind, tree=tree)


def _inspect_sessions(folder: Path) -> Finding:
    """Inspect the sessions of a server, with the checkpoints that are saved beside them."""
    beside, parts, about = folder / PREFIXES, tuple[Finding, ...](), None
    if (beside / CHECKPOINTS_FILE).exists():
        parts, (_, about) = (_inspect_prefixes(beside),), read_blocks(str(beside / CHECKPOINTS_FILE))
    found = read_sessions(folder, about)
    return Finding(
        "server's sessions", str(folder), not found.faults, found.facts, found.by_kind, tree=found.tree, parts=parts
    )


def _inspect_chat(folder: Path) -> Finding:
    about = read_about(folder / SESSION_FILE)  # This call also compares the checksum.
    try:
        messages, name = list(about["messages"]), about["memory"]
        roles = Counter(str(message["role"]) for message in messages)
        facts = {
            "format": f"{about['format']}, version {about['version']}", "model": str(about["model"]),
            "messages": len(messages), **{f"by {role}": n for role, n in roles.items()}, "heard": int(about["n_heard"]),
            "tokens chosen by the model": sum(len(message["token_ids"]) for message in messages),
            "tokens a reply": int(about["max_tokens"]), "sampling": dict(about["sampling"]),
            "stop": list(about["stop"]),
        }  # fmt: skip
        tree = branches_of(about) if about.get("branches") else ()
        if name is not None and (not isinstance(name, str) or Path(name).name != name):
            raise ValueError(f"memory {name!r}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(f"{folder / SESSION_FILE} contradicts itself ({error!r}); save the session again") from error
    by_kind = {SESSION_FILE: (folder / SESSION_FILE).stat().st_size}
    parts = () if name is None else (_inspect_sequence(folder / name),)
    return Finding(
        "saved chat", str(folder), True, facts, by_kind | {p.path: sum(p.by_kind.values()) for p in parts}, tree=tree,
        parts=parts,
    )  # fmt: skip


def _inspect_model(path: Path) -> Finding:
    """Inspect a model's folder, or only a config."""
    config_path = path / "config.json" if path.is_dir() else path
    raw = _read_object(config_path)
    if "architectures" not in raw and "model_type" not in raw:
        raise FormatError(f"{config_path} describes no model: it names no architecture; give a model's config.json")
    names = raw.get("architectures")
    facts: dict[str, Any] = {
        "architecture": str(names[0]) if isinstance(names, list) and names else f"unnamed ({raw.get('model_type')})"
    }
    has_weights = path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")))
    checkpoint = UnreadCheckpoint(path, torch.float32) if has_weights else None
    try:
        facts |= _describe_model(path, checkpoint)
    except (UnsupportedModelError, FormatError) as error:
        facts["loads"] = f"no: {error}"
    stored = [] if checkpoint is None else [
        Stored(name, dtype, shape, math.prod(shape) * _item_bits(dtype) // 8) for name,
        (dtype, shape) in checkpoint.stored.items()
    ]  # fmt: skip
    by_kind: Counter[str] = Counter()
    for tensor in stored:
        by_kind[tensor.dtype] += tensor.n_bytes
    return Finding("model" if has_weights else "config", str(path), None, facts, dict(by_kind), _largest(stored))


def _inspect_gguf(path: Path) -> Finding:
    """Inspect a GGUF file. The names and shapes of all tensors are compared with those that the model needs."""
    file = GgufFile(path)
    facts: dict[str, Any] = {"architecture": file.architecture, "tensors": len(file)}
    try:
        opened = open_model(path)
        config, spec = opened.config, opened.dry_spec()
        template = file.value("tokenizer.chat_template", is_needed=False)
        facts |= {
            "dtype": str(spec.dtype).removeprefix("torch."), "vocabulary": spec.vocab_size, **_context(config),
            "chat template": "yes" if template else "no: it continues texts, and does not chat",
            "layers": len(spec.layers), **_layers_by_kind(spec), **_describe_weights(config, find_files(path, config)),
            "loads": "yes",
        }  # fmt: skip
    except (UnsupportedModelError, FormatError) as error:
        facts["loads"] = f"no: {error}"
    stored = [Stored(name, file.stored_dtype(name), file.shape(name), file.n_bytes(name)) for name in file]
    by_kind: Counter[str] = Counter()
    for tensor in stored:
        by_kind[tensor.dtype] += tensor.n_bytes
    return Finding("model", str(path), None, facts, dict(by_kind), _largest(stored))


def _describe_model(path: Path, checkpoint: UnreadCheckpoint | None) -> dict[str, Any]:
    """Describe the model that a config defines.

    If there are weights, the names and shapes of all tensors are compared with those that the model needs.
    """
    config, model_class = read_config(path)
    if (coding := find_coding(config)) is not None and checkpoint is not None:
        checkpoint.decode_with(coding)
    model = build(model_class, config, checkpoint or DryCheckpoint(config.architectures[0], torch.float32))
    spec = model.memory_spec
    dtype = config.dtype or config.get_text_config().dtype
    facts = {
        "dtype": str(dtype).removeprefix("torch."),
        "vocabulary": spec.vocab_size,
        **_context(config),
        "layers": len(spec.layers),
        **_layers_by_kind(spec),
        **_describe_weights(config, checkpoint),
    }
    if checkpoint is None:
        return facts | {"loads": "its config does; there are no weights beside it"}
    has_head = _describe_draft_head(model, checkpoint) or _describe_head_beside(path)
    left = checkpoint.leftovers()
    return facts | {
        **({} if has_head is None else {"draft head": has_head}),
        "tensors": len(checkpoint),
        **({"tensors of their own, although the config ties them": list(own)} if (own := checkpoint.differing) else {}),
        **({"tensors that nobody asks for": left[:MOST_TENSORS]} if left else {}),
        "loads": "yes",
    }


def _describe_draft_head(model: object, checkpoint: UnreadCheckpoint) -> str | None:
    """Say whether the checkpoint's draft head can be loaded. None: it has none."""
    if not isinstance(model, Decoder):
        return None
    try:
        head = model.load_draft_head(checkpoint)
    except UnsupportedModelError as error:
        checkpoint.ignore(*checkpoint.names_below(model.draft_prefixes))
        return f"no: {error}"
    return None if head is None else _TAKEN


def _describe_head_beside(path: Path) -> str | None:
    """Say which folder beside the files has a draft head. None: there is none."""
    beside = folder_beside(path)
    return None if beside is None else f"{_TAKEN}, from {beside.name}/"


def _describe_weights(config: PreTrainedConfig, files: Checkpoint | None) -> dict[str, Any]:
    """Return the bytes of the weights for each value of `load_model(weights=...)`, and how "auto" holds them."""
    kinds, n_bytes = Counter[Kind](), {}
    for name in get_args(WeightFormat):
        with noting_kinds(kinds if name == "auto" else Counter()):
            n_bytes[name] = weight_bytes(dry_model(config, config.architectures[0], weights=name, files=files))
    told: dict[str, Any] = {"bytes of weights when loaded": n_bytes}
    if any(kind.stored is not None for kind in kinds):
        told["weights that auto holds"] = numbers_by_name(kinds)
    return told


def _context(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the most tokens for which the model was made, if its config names them."""
    n_tokens = named_context_tokens(config)
    return {} if n_tokens is None else {"tokens of context": n_tokens}


def _layers_by_kind(spec: MemorySpec) -> dict[str, str]:
    """Count the layers of each kind of memory, and describe the size of a token or state in each."""
    found: Counter[tuple[str, str]] = Counter()
    for memory in (m for layer in spec.layers for m in layer):
        if isinstance(memory, RecurrentSpec):
            states = ", ".join(f"{s.name} {'×'.join(map(str, s.shape))}" for s in memory.states)
            found[memory.family, f"rows of {'×'.join(map(str, memory.row_shape))}; {states}"] += 1
            continue
        heads = f"{memory.n_query_heads} query and {memory.n_kv_heads} key heads of {memory.head_dim}"
        kind = MemorySpec.kind_of(memory)
        if isinstance(memory, AttentionSpec) and memory.window is not None:
            kind += f" over {memory.window}"
        found[kind, heads] += 1
    return {kind: f"{n} × {what}" for (kind, what), n in found.items()}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no JSON: {error}; give a model's config.json") from error
    if not isinstance(raw, dict):
        raise FormatError(f"{path} holds no JSON object; give a model's config.json")
    return raw


def _item_bits(dtype: str) -> int:
    return _ITEM_BITS.get(dtype, 8 if "8" in dtype else 16)


def _largest(tensors: list[Stored]) -> tuple[Stored, ...]:
    return tuple(sorted(tensors, key=lambda tensor: -tensor.n_bytes)[:MOST_TENSORS])
