"""What starts import: a second here is a second of every command, notebook and test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.gguf_files import write_gguf

FRAMEWORKS = {"fastapi", "matplotlib", "numba", "openai", "pandas", "transformers", "uvicorn"}
MODELING = "transformers.modeling_utils"
STARTS = {
    "from hybridmem import HybridMemory": FRAMEWORKS | {"rich", "safetensors", "triton.language", "typer"},
    "from hybridmem import models": FRAMEWORKS,
    "import sys; sys.argv[1:] = ['--help']; from hybridmem.chat.cli import main; main()": FRAMEWORKS
    | {"torch", "hybridmem.memory"},
    "import sys; sys.argv[1:] = ['plan', '--model', 'embedded']; from hybridmem.chat.cli import main; main()": {
        "torch._dynamo"
    },
    "from hybridmem.chat.engine.engine import Engine\nfrom hybridmem.chat.prompts import load_tokenizer\n"
    "from hybridmem import load_model\n"
    "load_model('embedded'), load_tokenizer('embedded')": {MODELING, "torch._dynamo", "matplotlib", "fastapi"},
}
"""Program -> modules that it does not import."""


@pytest.mark.parametrize("program", STARTS)
def test_a_start_imports_what_it_uses(program: str) -> None:
    assert STARTS[program].isdisjoint(imported_by(program))


def imported_by(program: str, *arguments: str) -> list[str]:
    told = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{program}"
    done = subprocess.run([sys.executable, "-c", told, *arguments], capture_output=True, text=True, check=True)
    return done.stderr.split()


USES_GGUF = """
from typer.testing import CliRunner
from hybridmem.chat.cli import app
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
for path in sys.argv[1:]:
    for command in "inspect", "plan --context 1k --model":
        result = CliRunner().invoke(app, [*command.split(), path])
        assert result.exit_code == 0, result.output
    model = load_model(path)
    memory = HybridMemory(model.memory_spec, "1MiB")
    memory.run(model, {memory.open(): [1, 2, 3]})
"""


def test_no_compiler_of_torch_is_imported_for_a_gguf_file(tmp_path: Path) -> None:
    """triton writes pages about leaks when a process ends that has imported it so."""
    paths = []
    for name in ("granite-moe-hybrid-rope-two-of-four-experts", "llama-3-rope"):
        (folder := tmp_path / name).mkdir()
        paths.append(str(write_gguf(write_checkpoint(folder, CONFIGS[name]()), folder / "model.gguf")))
    assert {"torch._dynamo", "triton"}.isdisjoint(imported_by(USES_GGUF, *paths))
