"""GuideLLM measures the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PACKAGE = "guidellm"
TOKENIZER = Path(__file__).parent.parent.parent / "models" / "embedded"


def test_run(url: str, tmp_path: Path) -> None:
    """a synchronous run over chat completions."""
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={url.removesuffix('/v1')}",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=3",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [str(Path(sys.executable).with_name("guidellm")), "run", *words, "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 3 and not benchmark["requests"]["errored"]
