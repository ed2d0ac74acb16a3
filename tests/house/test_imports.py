"""Commands import little when they start: a second here is a second of every command, notebook and test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hybridmem
from hybridmem import memory, models
from hybridmem.models import EMBEDDED
from tests.extent import only_in_long
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.weights.test_gguf_forms import WIDE

ROOT = Path(__file__).parent.parent.parent
FRAMEWORKS = {"matplotlib", "numba", "openai", "pandas", "starlette", "transformers", "uvicorn"}
MODELING = "transformers.modeling_utils"
STARTS = {
    "from hybridmem import HybridMemory": FRAMEWORKS | {"rich", "safetensors", "triton.language", "typer"},
    "from hybridmem import models": FRAMEWORKS,
    "from hybridmem.chat.engine.engine import Engine\nfrom hybridmem.chat.prompts import load_tokenizer\n"
    "from hybridmem import load_model\n"
    "load_model('embedded'), load_tokenizer('embedded')": {MODELING, "torch._dynamo", "matplotlib", "starlette"},
    "sys.argv[1:] = ['plan', '--model', 'embedded']; from hybridmem.chat.cli import main; main()": {"torch._dynamo"},
}
"""Program -> modules that it does not import."""
HELP = "sys.argv[1:] = ['--help']; from hybridmem.chat.cli import main; main()"


def test_starts_import_what_they_use() -> None:
    """Each start may import only what it uses.

    The starts run one after another in one process, because each begins with torch. What is imported stays, so no start
    may import what only a later one may.
    """
    found = imported_by(*STARTS)
    assert len(found) == len(STARTS)
    for (program, unused), names in zip(STARTS.items(), found, strict=True):
        assert unused.isdisjoint(names), (program, unused & set(names))


def test_help_needs_no_torch() -> None:
    (names,) = imported_by(HELP)
    assert (FRAMEWORKS | {"torch", "hybridmem.memory"}).isdisjoint(names)


def imported_by(*programs: str, arguments: tuple[str, ...] = ()) -> list[list[str]]:
    """Return which modules a process has after each of the programs has run. The last program may end the process."""
    tell = "\nprint(*sys.modules, file=sys.stderr)\n"
    *others, last = programs
    code = "import atexit, sys\n" + "".join(program + tell for program in others)
    code += f"atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{last}"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stderr.splitlines() if line.startswith("sys ")]


USES_GGUF = """
from typer.testing import CliRunner
from hybridmem.chat.cli import app
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
def call(command, path):
    result = CliRunner().invoke(app, [*command.split(), path])
    assert result.exit_code == 0, result.output
for path in sys.argv[1:]:
    call("inspect", path)
for path in sys.argv[1:4]:
    call("plan --context 1k --model", path)
    model = load_model(path)
    memory = HybridMemory(model.memory_spec, "1MiB")
    memory.run(model, {memory.open(): [1, 2, 3]})
"""


@only_in_long
def test_no_part_of_torch_is_imported_for_a_gguf_file_that_uses_nothing_of_it(tmp_path: Path) -> None:
    """Torch's compiler imports triton, which writes pages about leaks when the process ends."""
    paths = []
    names = ("granite-moe-hybrid-rope-two-of-four-experts", "llama-3-rope")
    files = {name: (CONFIGS[name], "F32") for name in names} | {
        name: (WIDE[name], "Q8_0") for name in ("llama", "qwen3.5")
    }
    for name, (make, kind) in files.items():
        (folder := tmp_path / name).mkdir()
        paths.append(str(write_gguf(write_checkpoint(folder, make()), folder / "model.gguf", kind)))
    unused = {"sympy", "torch._dynamo", "torch.distributed.tensor", "transformers.activations", "triton"}
    (names,) = imported_by(USES_GGUF, arguments=tuple(paths))
    assert unused.isdisjoint(names)


SERVE = """
import uvicorn
uvicorn.Server.run = lambda server, sockets: None
sys.argv[1:] = ["serve", "--port", "0", "--threads", "1", "--budget", "8MiB", "--model", sys.argv[1]]
from hybridmem.chat.cli import main
main()
"""
UNUSED_BY_SERVERS = {
    "fastapi", "matplotlib", "pandas", "rich", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    "transformers.activations", MODELING, "triton",
}  # fmt: skip


@only_in_long
def test_a_server_of_a_gguf_file_imports_no_heavy_module(tmp_path: Path) -> None:
    """Each of these takes a twentieth of a second of every start, or more."""
    path = write_gguf(EMBEDDED, tmp_path / "model.gguf", "Q8_0")
    (names,) = imported_by(SERVE, arguments=(str(path),))
    assert {"hybridmem.chat.server.app", "torch", "numba"} <= set(names)
    assert UNUSED_BY_SERVERS.isdisjoint(names), UNUSED_BY_SERVERS & set(names)


# The tests below run in a folder with modules of the same names as our packages.


README_LINES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
FIRST_CELLS = [
    next("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
]


@only_in_long
def test_a_program_may_have_modules_called_memory_and_models(tmp_path: Path) -> None:
    """Python finds the program's modules first, and they hide nothing of the library."""
    for name in ("memory.py", "models/__init__.py", "chat.py", "cluster/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("MINE = True\n")
    programs = ["\n".join(README_LINES), *FIRST_CELLS]
    assert len(FIRST_CELLS) >= 6 and "HybridMemory(" in programs[0]
    code = "import memory, models, chat, cluster\nassert memory.MINE and models.MINE and chat.MINE and cluster.MINE\n"
    for number, program in enumerate(programs):
        (tmp_path / f"program{number}.py").write_text(program)
        code += f"import runpy\nrunpy.run_path('program{number}.py')\n"
    (tmp_path / "all.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "all.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["memory", "models", "chat", "cluster"])
def test_a_folder_of_the_repository_is_no_package_by_itself(folder: str) -> None:
    """Its classes would differ from those of hybridmem, so no `except` would know its errors."""
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"import hybridmem.{folder}" in done.stderr


def test_hybridmem_offers_what_memory_and_models_do() -> None:
    offered = {name for name in hybridmem.__all__ if name != "__version__"}
    assert offered == {*memory.__all__, *models.__all__}
