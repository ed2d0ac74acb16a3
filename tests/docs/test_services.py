"""The systemd unit and the Containerfile of the guide parse, and start a server that answers."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import typer

from hybridmem.chat.cli import app
from tests.docs.pages import ROOT, read_blocks
from tests.extent import only_in_long

GUIDE = ROOT / "docs" / "how-to" / "server.md"
PROGRAM = "/opt/hybrid-memory/bin/hybrid-memory"
INSTRUCTIONS = {"FROM", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def block(title: str) -> str:
    return next(block.code for block in read_blocks(GUIDE) if block.title == title)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(block("hybrid-memory.service"))
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    program = tmp_path / "hybrid-memory"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "hybrid-memory.service"
    path.write_text(block("hybrid-memory.service").replace(PROGRAM, str(program)))
    found = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    about_it = [line for line in found.stderr.splitlines() if "hybrid-memory" in line]
    assert (about_it, found.returncode) == ([], 0)


@only_in_long
def test_the_command_of_the_unit_starts_and_answers(tmp_path: Path) -> None:
    service = unit()["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program == PROGRAM and service["Type"] == "exec"
    config = tmp_path / "server.toml"
    config.write_text(f'port = 0\nbudget = "32MiB"\nprefixes = "{tmp_path}/prefixes"\n')
    words = [word.replace("/etc/hybrid-memory", str(tmp_path)) for word in arguments]
    command = [sys.executable, "-c", "from hybridmem.chat.cli import main; main()", *words]
    environment = os.environ | {"HYBRID_MEMORY_API_KEY": "secret", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        killer = threading.Timer(600, process.kill)
        killer.start()
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            check = json.loads(instructions()["HEALTHCHECK"].removeprefix("CMD "))
            assert check[:2] == ["python", "-c"]
            exec(check[2].replace("http://127.0.0.1:8000", url))
            wanted = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": "Bearer secret"})
            with urllib.request.urlopen(wanted) as answer:
                assert json.load(answer)["data"][0]["id"] == "embedded"
            process.send_signal(signal.SIGTERM)
            assert process.wait() == -signal.SIGTERM
        finally:
            killer.cancel()
            process.kill()


def instructions() -> dict[str, str]:
    lines = [line.partition(" ") for line in block("Containerfile").splitlines() if line]
    assert {name for name, _, _ in lines} <= INSTRUCTIONS and lines[0][0] == "FROM"
    return {name: rest for name, _, rest in lines}


def test_the_container_runs_commands_that_exist() -> None:
    group = typer.main.get_command(app)
    by_name = instructions()
    assert json.loads(by_name["ENTRYPOINT"]) == ["hybrid-memory"]
    commands = [json.loads(by_name["CMD"])]
    runs = re.findall(r"^RUN hybrid-memory (.*)$", block("Containerfile"), re.MULTILINE)
    commands += [shlex.split(line) for line in runs]
    assert len(commands) == 2
    for name, *words in commands:
        group.commands[name].make_context(name, words)  # type: ignore[attr-defined]
    variables = dict(
        pair.split("=") for line in re.findall(r"^ENV (.*)$", block("Containerfile"), re.M) for pair in line.split()
    )
    assert variables.keys() == {"HYBRID_MEMORY_CACHE", "HYBRID_MEMORY_HOST", "HYBRID_MEMORY_PORT"}
    assert by_name["EXPOSE"] == variables["HYBRID_MEMORY_PORT"]
