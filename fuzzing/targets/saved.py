"""Feeds saved files of a memory, a prefix cache and a chat: damaged bytes, or damaged values with valid checksums."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from fuzzing.mutation import damage_bytes, damage_json
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.session import ChatSession
from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.errors import CapacityError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import load_model
from tests.data.sequences import write
from tests.inside import forged_file

_FIXTURES = Path(write.__file__).parent


def split_file(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and the bytes of its tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:end])
    return header, data[end:]


def join_file(header: dict[str, Any], tensors: bytes) -> bytes:
    """Return a safetensors file made of a header and the bytes of its tensors."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def sign(data: bytes) -> bytes:
    """Return a file with valid checksums of its content. A file that cannot be read at all is returned unchanged."""
    try:
        header, _ = split_file(data)
        return forged_file(load(data), dict(header["__metadata__"]))
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return data


def damage_file(data: bytes, random: Random) -> bytes:
    """Damage a file's bytes; or damage its header or tensors, and make the checksum valid again."""
    kind = random.random()
    if kind < 0.2:
        return damage_bytes(data, random)
    header, tensors = split_file(data)
    if kind < 0.9:
        damaged = damage_json(header, random)
        header = damaged if isinstance(damaged, dict) else header
    else:
        tensors = damage_bytes(tensors, random)
    try:
        return sign(join_file(header, tensors))
    except (UnicodeEncodeError, RecursionError):
        return damage_bytes(data, random)


def use(memory: HybridMemory, sequence: Sequence, feed: Callable[[HybridMemory, Sequence, list[int]], Any]) -> None:
    """Feed a sequence tokens, take one back, and check the memory's books."""
    try:
        feed(memory, sequence, [1, 2, 3])
        memory.rollback(sequence, to=sequence.length - 1)
        feed(memory, sequence, [4])
    except CapacityError:
        pass
    memory.check()


class SavedSequence:
    """Loads damaged files of `memory.save` into a memory of the same kind."""

    def __init__(self, folder: Path) -> None:
        self._path, self._folder = folder / "saved.safetensors", folder
        self._files = sorted(_FIXTURES.glob("version_*/*.safetensors"))
        self._memories: dict[str, HybridMemory] = {}

    def draw(self, random: Random) -> bytes:
        path = random.choice(self._files)
        name = "keep" if path.stem == "family" else path.stem
        return f"{name}\n".encode() + damage_file(path.read_bytes(), random)

    def _memory(self, name: str) -> HybridMemory:
        if name not in self._memories:
            spec, options = write.SUBJECTS[name]
            self._memories[name] = HybridMemory(spec, **write.OPTIONS, **options, poison=True)
        return self._memories[name]

    def read(self, data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        memory = self._memory(name.decode())
        self._path.write_bytes(content)
        before = memory.counters.used_bytes
        try:
            sequence = memory.load(self._path)
            try:
                use(memory, sequence, write.feed)
            finally:
                memory.close(sequence)
        finally:
            memory.check()
            assert memory.counters.used_bytes == before, "bytes of a refused or closed sequence are still in use"


class SavedFamily:
    """Loads damaged files of a sequence with checkpoints and forks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "family.safetensors"
        memory, sequence = write.make("keep")
        memory.checkpoint(sequence)
        write.feed(memory, sequence, [5, 6, 7])
        fork = memory.fork(sequence)
        write.feed(memory, fork, [8] * 9)
        memory.checkpoint(fork)
        memory.save(sequence, self._path, checkpoints=True, forks={"other": fork})
        self._seed = self._path.read_bytes()
        spec, options = write.SUBJECTS["keep"]
        self._memory = HybridMemory(spec, **write.OPTIONS, **options, poison=True)

    def draw(self, random: Random) -> bytes:
        return damage_file(self._seed, random)

    def read(self, data: bytes) -> None:
        self._path.write_bytes(data)
        memory, before = self._memory, self._memory.counters.used_bytes
        try:
            family = memory.load(self._path, family=True)
            members = [family.sequence, *family.forks.values()]
            try:
                for sequence in members:
                    use(memory, sequence, write.feed)
                for checkpoint in family.checkpoints:
                    again = memory.fork(checkpoint)
                    members.append(again)
                    use(memory, again, write.feed)
            finally:
                for sequence in (*members, *family.checkpoints):
                    memory.close(sequence)
        finally:
            memory.check()
            assert memory.counters.used_bytes == before, "bytes of a refused or closed family are still in use"


class SavedPrefixes:
    """Loads folders of a prefix cache in which one file is damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, folder / "prefixes"
        memory, _ = write.make("keep")
        cache = PrefixCache(memory)
        for tail in ([9] * 12, [10] * 20, []):
            tokens = [*write.TOKENS[:30], *tail]
            sequence, _ = cache.open(tokens)
            write.feed(memory, sequence, tokens[sequence.length :])
            cache.insert(sequence)
            memory.close(sequence)
        cache.save(self._place)
        self._seeds = {path.name: path.read_bytes() for path in sorted(self._place.iterdir()) if path.is_file()}

    def draw(self, random: Random) -> bytes:
        name = random.choice(sorted(self._seeds))
        return f"{name}\n".encode() + damage_file(self._seeds[name], random)

    def read(self, data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        for own, seed in self._seeds.items():
            (self._place / own).write_bytes(content if own == name.decode() else seed)
        spec, options = write.SUBJECTS["keep"]
        memory = HybridMemory(spec, **write.OPTIONS, **options, poison=True)
        cache = PrefixCache(memory)
        try:
            cache.load(self._place)
            tokens = [*write.TOKENS[:30], *([10] * 20), 3]
            sequence, _ = cache.open(tokens)
            write.feed(memory, sequence, tokens[sequence.length :])
            use(memory, sequence, write.feed)
            memory.close(sequence)
        finally:
            memory.check()


class SavedChat:
    """Resumes saved chats in which the list of messages or the memory's file is damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, folder / "chat"
        self._model, self._tokenizer = load_model("embedded"), load_tokenizer("embedded")
        session = ChatSession(self._engine())
        session.say("My cat is called Milo.", max_tokens=6)
        session.branch().say("What is my cat called?", max_tokens=6)
        session.save(self._place)
        self._seeds = {path.name: path.read_bytes() for path in sorted(self._place.iterdir()) if path.is_file()}

    def _engine(self) -> Engine:
        return Engine(self._model, HybridMemory(self._model.memory_spec, budget="64MiB"), self._tokenizer)

    def draw(self, random: Random) -> bytes:
        name = random.choice(sorted(self._seeds))
        data = self._seeds[name]
        if name.endswith(".json"):
            about = damage_json(json.loads(data), random)
            if isinstance(about, dict):
                about.pop("sha256", None)
                text = json.dumps(about, sort_keys=True)
                about["sha256"] = sha256(text.encode()).hexdigest()
            content = json.dumps(about).encode()
        else:
            content = damage_file(data, random)
        return f"{name}\n".encode() + content

    def read(self, data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        for own, seed in self._seeds.items():
            (self._place / own).write_bytes(content if own == name.decode() else seed)
        engine = self._engine()
        try:
            session = ChatSession.resume(engine, self._place)
            for own in (session, *session.branches):
                own.say("And now?", max_tokens=2)
        finally:
            engine.memory.check()
