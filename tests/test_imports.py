"""What starts import: a second here is a second of every command, notebook and test."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = {"fastapi", "matplotlib", "numba", "openai", "pandas", "transformers", "uvicorn"}
MODELING = "transformers.modeling_utils"
STARTS = {
    "import memory": FRAMEWORKS | {"rich", "safetensors", "triton.language", "typer"},
    "import models": FRAMEWORKS,
    "import sys; sys.argv[1:] = ['--help']; from chat.cli import main; main()": FRAMEWORKS | {"torch", "memory"},
    "import sys; sys.argv[1:] = ['plan', '--model', 'embedded']; from chat.cli import main; main()": {"torch._dynamo"},
    "from chat.engine.engine import Engine\nfrom chat.prompts import load_tokenizer\nfrom models import load_model\n"
    "load_model('embedded'), load_tokenizer('embedded')": {MODELING, "torch._dynamo", "matplotlib", "fastapi"},
}
"""Program -> modules that it does not import."""


@pytest.mark.parametrize("program", STARTS)
def test_a_start_imports_what_it_uses(program: str) -> None:
    told = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{program}"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert STARTS[program].isdisjoint(done.stderr.split())
