"""Commands import torch and transformers faster, and find in them what others find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import transformers
from transformers.utils import import_utils

from hybridmem import light_imports
from tests.extent import IS_LONG
from tests.models.checkpoints import write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.loading.test_gguf import FAMILIES, config_in_a_file
from tests.models.weights.test_gguf_forms import WIDE

COMPILER_LATER = """
import sys
from hybridmem import light_imports
light_imports.begin("transformers", "a_module_that_is_not_installed")
import torch
assert "torch._refs" not in sys.modules and not hasattr(torch._meta_registrations, "activate_meta")
import torch._dynamo
assert "torch._refs" in sys.modules and hasattr(torch._meta_registrations, "activate_meta")
assert sys.modules["torch._meta_registrations"] is torch._meta_registrations
assert torch.cholesky_inverse(torch.empty(4, 4, device="meta")).shape == (4, 4)
import transformers
from transformers.utils import import_utils as listing
assert "partial" in repr(listing.fetch__all__)
assert transformers.LlamaConfig().model_type == "llama"
"""


DRY_RUNS = """
import sys
from hybridmem import light_imports
light_imports.begin("transformers")
import torch
from hybridmem.models.loading.load import open_model, plan_memory
for path in sys.argv[1:]:
    open_model(path).dry_spec()
assert not hasattr(torch._meta_registrations, "activate_meta")
assert "torch.distributed.tensor" not in sys.modules, "torch's dispatch imports it for tensors in few bits"
from transformers import ZayaConfig
plan_memory(ZayaConfig(), "ZayaForCausalLM")  # Its dry run turns a tensor around.
"""


def test_dry_runs_of_gguf_files_need_nothing_of_it_and_others_get_it(tmp_path: Path) -> None:
    in_floats = FAMILIES if IS_LONG else ("gemma3", "rwkv7")
    in_few_bits = WIDE if IS_LONG else ("jamba", "llama", "qwen3.5")
    configs = [(config_in_a_file(name), "F32") for name in in_floats]
    configs += [(WIDE[name](), "Q8_0") for name in in_few_bits]
    paths = []
    for i, (config, kind) in enumerate(configs):
        (folder := tmp_path / f"{i}").mkdir()
        config.time_step_limit = (0.0, float("inf"))  # llama.cpp supports no other limit.
        paths.append(str(write_gguf(write_checkpoint(folder, config), folder / "model.gguf", kind)))
    done = subprocess.run([sys.executable, "-c", DRY_RUNS, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_torch_registers_for_its_compiler_is_there_when_the_compiler_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILER_LATER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_lists_the_same_names() -> None:
    fetch = import_utils.fetch__all__
    files = sorted((Path(transformers.__file__).parent / "models").glob("*/*.py"))
    contents = [path.read_text() for path in files] + ["", "__all__ = ['a']", "x\n__all__ = ['a']\n__all__ = ['b']"]
    assert len(contents) > 1000
    for content in contents:
        assert light_imports._from_its_line(fetch, content) == fetch(content)


def test_nothing_changes_when_torch_is_imported_already() -> None:
    before = [*sys.meta_path]
    light_imports.begin("transformers")
    assert sys.meta_path == before
