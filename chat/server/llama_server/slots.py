"""Saves, restores and erases the prefixes of slots, as llama.cpp's server does at /slots/{id}.

This server has no slots: every prefix has a place of its own. A slot here is a name, by which a client that gives
`id_slot` finds the prefix of its last completion. A saved slot is a file of `HybridMemory.save`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.checked import ANY, Checked, Neutral, read_request
from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.service import Service
from hybridmem.memory import CapacityError, FormatError
from hybridmem.memory.prefix import PrefixCache

_MOST_SLOTS = 1024
"""The prefixes of so many slots are known by their numbers: those that were used last."""
_FILENAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


class SlotRequest(Checked):
    """Holds a request to POST /slots/{id}."""

    neutral: ClassVar[Neutral] = {"model": ANY}
    filename: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None


class Slots:
    """Knows which tokens the last completion of each slot had."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokens: OrderedDict[tuple[bytes, int], list[int]] = OrderedDict()

    def note(self, owner: bytes, slot: int, token_ids: list[int]) -> None:
        """Remember the tokens of a slot's last completion."""
        self._tokens[owner, slot] = token_ids
        self._tokens.move_to_end((owner, slot))
        if len(self._tokens) > _MOST_SLOTS:
            self._tokens.popitem(last=False)

    async def change(self, request: Request, slot: int) -> Response:
        action, asked = request.query_params.get("action"), read_request(SlotRequest, await request.body() or b"{}")
        changes = {"save": self._save, "restore": self._restore, "erase": self._erase}
        if action not in changes:
            message = f"Invalid 'action': give ?action=save, restore or erase, not {clip(repr(action))}."
            raise ApiError(400, message, param="action", code="invalid_value")
        prefixes, owner = self._service.engine.prefixes, self._service.owners.of_prefixes(request.headers.get, asked)
        if prefixes is None:
            raise ApiError(501, "This server keeps no prefixes.", param="id_slot", code="not_supported")
        path = None if action == "erase" else self._path(owner, asked.filename)
        started = time.perf_counter()
        try:
            told = await asyncio.to_thread(changes[action], prefixes, owner, slot, path or Path())
        except FormatError as error:
            raise ApiError(400, f"{error}.", param="filename", code="invalid_value") from None
        except CapacityError:
            raise ApiError(503, "The memory cannot hold this now; try again.", code="out_of_memory") from None
        spent = {"timings": {f"{action}_ms": 1000 * (time.perf_counter() - started)}} if path is not None else {}
        return JSONResponse({"id_slot": slot, **told, **spent})

    def _path(self, owner: bytes, filename: str | None) -> Path:
        """Return the path of a file, at which only its owner finds it."""
        folder = self._service.options.slot_save_path
        if folder is None:
            message = (
                "This server saves no slots. Start it with --slot-save-path FOLDER, or --prefixes for all prefixes."
            )
            raise ApiError(501, message, param="id_slot", code="not_supported")
        if filename is None or not _FILENAME.fullmatch(filename):
            message = "Invalid 'filename': give up to 100 letters, digits, '_', '-' and '.', such as 'chat.bin'."
            raise ApiError(400, message, param="filename", code="invalid_value")
        return Path(folder) / owner.hex()[:32] / filename

    @staticmethod
    def _drafts_of(path: Path) -> Path:
        """Return where the file lies that holds what a drafter remembers of a slot's text."""
        return path.parent / ".drafts" / path.name  # No slot's file has a name that begins with a dot.

    def _save(self, prefixes: PrefixCache, owner: bytes, slot: int, path: Path) -> dict[str, object]:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._service.engine.lock:
            found = prefixes.checkpoints_of(self._known(owner, slot), owner)
            if not found:
                raise ApiError(404, f"The prefix of slot {slot} has given way to others.", param="id_slot")
            longest = max(found, key=lambda checkpoint: checkpoint.length)
            n_tokens = longest.length
            self._service.engine.memory.save(longest, path)
            if (texts := self._service.engine.drafted_texts) is not None:
                drafts = self._drafts_of(path)
                drafts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                if not texts.save([longest.tokens], owner, drafts):
                    drafts.unlink(missing_ok=True)
        return {"filename": path.name, "n_saved": n_tokens, "n_written": path.stat().st_size}

    def _restore(self, prefixes: PrefixCache, owner: bytes, slot: int, path: Path) -> dict[str, object]:
        memory = self._service.engine.memory
        with self._service.engine.lock:
            sequence = memory.load(path)
            try:
                token_ids = sequence.tokens.tolist()
                prefixes.insert(sequence, owner)
            finally:
                memory.close(sequence)
            if (texts := self._service.engine.drafted_texts) is not None:
                texts.load(self._drafts_of(path), owner)
        self.note(owner, slot, token_ids)
        return {"filename": path.name, "n_restored": len(token_ids), "n_read": path.stat().st_size}

    def _erase(self, prefixes: PrefixCache, owner: bytes, slot: int, path: Path) -> dict[str, object]:
        with self._service.engine.lock:
            token_ids = self._known(owner, slot)
            found = prefixes.checkpoints_of(token_ids, owner)
            n_tokens = max((checkpoint.length for checkpoint in found), default=0)
            prefixes.forget(token_ids, owner)
        self._tokens.pop((owner, slot), None)
        return {"n_erased": n_tokens}

    def _known(self, owner: bytes, slot: int) -> list[int]:
        found = self._tokens.get((owner, slot))
        if found is None:
            message = f"Slot {slot} has no prefix; send a completion with 'id_slot': {slot} first."
            raise ApiError(404, message, param="id_slot", code="slot_not_found")
        return found
