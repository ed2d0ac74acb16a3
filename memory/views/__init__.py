"""Shows what a memory holds: counters, bytes by pool and by sequence, and tables."""

from hybridmem.memory.views.palette import COLOURS, pool_colours, shades
from hybridmem.memory.views.text_tables import format_bytes
from hybridmem.memory.views.usage import PARTS, BySequence, Inventory, Place, Usage, measure

__all__ = [
    "COLOURS",
    "PARTS",
    "BySequence",
    "Inventory",
    "Place",
    "Usage",
    "format_bytes",
    "measure",
    "pool_colours",
    "shades",
]
