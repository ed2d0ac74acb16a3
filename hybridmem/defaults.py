"""Says the defaults that several packages share.

They are here, and not in `memory` or `chat`, because the command line names them in its help, and must import neither.
"""

ROLLBACK_WINDOW = 32
"""Tokens that every sequence can take back; see `HybridMemory`."""
STEP_TOKENS = 256
"""Tokens of prompts in one step of the engine; see `Engine`."""
PREFIX_GRID_TOKENS = 512
"""A prefix cache keeps a checkpoint at each multiple of this many tokens; see `PrefixCache`."""
