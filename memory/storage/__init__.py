"""Moves sequences out of the budget and back: into host memory, swap files and saved files."""

from hybridmem.memory.storage.family_files import SavedFamily, read_family
from hybridmem.memory.storage.files import (
    as_os_errors,
    check_url,
    is_local,
    join_path,
    list_names,
    local_place,
    make_folder,
    read_path,
)
from hybridmem.memory.storage.folders import CHECKPOINTS_FILE
from hybridmem.memory.storage.local_files import remove_abandoned, written_whole
from hybridmem.memory.storage.reading import read_blocks

__all__ = [
    "CHECKPOINTS_FILE",
    "SavedFamily",
    "as_os_errors",
    "check_url",
    "is_local",
    "join_path",
    "list_names",
    "local_place",
    "make_folder",
    "read_blocks",
    "read_family",
    "read_path",
    "remove_abandoned",
    "written_whole",
]
