"""How much is tried of what could be tried without end: places of interrupts, random prompts, examples, parameters.

By default little, so that all tests together take six minutes on two cores. `TESTS=long` tries more; `.ci/run` runs the
files that have such a form once more in this way.
"""

from __future__ import annotations

import os

IS_LONG = os.environ.get("TESTS") == "long"


def pick(by_default: int, in_long_form: int) -> int:
    return in_long_form if IS_LONG else by_default
