"""Feeds damaged files of a model's checkpoint: config, index of shards, tensors, GGUF, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedConfig

from fuzzing.mutation import damage_bytes, damage_json
from fuzzing.targets.saved import join_file, split_file
from hybridmem.chat.prompts import encode_chat, load_tokenizer
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
from hybridmem.models.loading.folders import EMBEDDED, read_config
from hybridmem.models.loading.load import dry_model
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.gguf_files import write_gguf


def _step(folder: Path) -> None:
    """Load a model and run a step of it."""
    model = load_model(folder, progress=False)
    memory = HybridMemory(model.memory_spec, budget="64MiB")
    sequence = memory.open()
    with memory.step({sequence: [1, 2, 3]}) as step:
        model(step)
    memory.check()


class ConfigFile:
    """Reads damaged configs of all architectures, and plans a memory for them, without weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seeds = []
        for name, make in sorted(CONFIGS.items()):
            config: PreTrainedConfig = make()
            config.save_pretrained(folder)
            about = json.loads((folder / "config.json").read_text())
            about["architectures"] = about.get("architectures") or config.architectures or [name]
            self._seeds.append(about)
        data = Path(__file__).parent.parent.parent / "tests" / "data" / "configs"
        self._seeds += [json.loads(path.read_text()) for path in sorted(data.glob("*.json"))]

    def draw(self, random: Random) -> bytes:
        if random.random() < 0.1:
            return damage_bytes(json.dumps(random.choice(self._seeds)).encode(), random)
        return json.dumps(damage_json(random.choice(self._seeds), random)).encode()

    def read(self, data: bytes) -> None:
        (self._folder / "config.json").write_bytes(data)
        config, _ = read_config(self._folder)
        model = dry_model(config, config.architectures[0])
        HybridMemory(model.memory_spec, budget="64MiB", device="meta")


class _Folder:
    """Holds a small random checkpoint of which one file is damaged."""

    damaged = "model.safetensors"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoint"
        write_checkpoint(self._folder, CONFIGS["jamba"]())
        self._seed = (self._folder / self.damaged).read_bytes()

    def read(self, data: bytes) -> None:
        (self._folder / self.damaged).write_bytes(data)
        _step(self._folder)


class SafetensorsFile(_Folder):
    """Loads models from damaged files of tensors."""

    def draw(self, random: Random) -> bytes:
        if random.random() < 0.4:
            return damage_bytes(self._seed, random)
        header, tensors = split_file(self._seed)
        return join_file(damage_json(header, random), tensors)


class ShardIndex(_Folder):
    """Loads models whose index of shards is damaged."""

    damaged = "model.safetensors.index.json"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoint"
        write_checkpoint(self._folder, CONFIGS["jamba"]())
        header, _ = split_file((self._folder / "model.safetensors").read_bytes())
        (self._folder / "model.safetensors").rename(self._folder / "model-00001-of-00001.safetensors")
        names = sorted(header.keys() - {"__metadata__"})
        weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
        self._seed = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()

    def draw(self, random: Random) -> bytes:
        if random.random() < 0.2:
            return damage_bytes(self._seed, random)
        return json.dumps(damage_json(json.loads(self._seed), random)).encode()


class GgufModel:
    """Loads models from damaged GGUF files."""

    def __init__(self, folder: Path) -> None:
        source = folder / "source"
        write_checkpoint(source, CONFIGS["jamba"]())
        self._path = folder / "model.gguf"
        seeds = [write_gguf(source, folder / f"{kind}.gguf", kind).read_bytes() for kind in ("F32", "Q8_0")]
        self._seeds: list[bytes] = seeds

    def draw(self, random: Random) -> bytes:
        return damage_bytes(random.choice(self._seeds), random)

    def read(self, data: bytes) -> None:
        self._path.write_bytes(data)
        _step(self._path)


class TokenizerFile:
    """Loads damaged tokenizers, and encodes a chat with what was loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tokenizer"
        self._folder.mkdir()
        self._seeds: dict[str, bytes] = {}
        for path in sorted(EMBEDDED.iterdir()):
            if path.suffix in (".json", ".jinja"):
                shutil.copy(path, self._folder)
                if "token" in path.name:
                    self._seeds[path.name] = path.read_bytes()

    def draw(self, random: Random) -> bytes:
        name = random.choice(sorted(self._seeds))
        seed = self._seeds[name]
        if random.random() < 0.2:
            content = damage_bytes(seed, random)
        else:
            value: Any = damage_json(json.loads(seed), random)
            content = json.dumps(value).encode()
        return f"{name}\n".encode() + content

    def read(self, data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        for own, seed in self._seeds.items():
            (self._folder / own).write_bytes(content if own == name.decode() else seed)
        tokenizer = load_tokenizer(self._folder)
        encode_chat(tokenizer, [{"role": "user", "content": "My cat is called Milo."}])
