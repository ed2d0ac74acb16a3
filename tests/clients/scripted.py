"""Serves the embedded model with a chat template that has tools, and with replies that the user's text prescribes.

    python tests/clients/scripted.py FOLDER [options of hybrid-memory serve]

No small model follows the prompts of agents, of some ten thousand tokens. So a user's message says which replies follow
it, one for each request: `[[CALL {"name": ..., "arguments": {...}}]]` calls a tool, `[[SAY text]]` is text, and
`[[ON text]]` is text that goes on until it is cut. Everything else is the server's own: the prompts and their lengths,
prefixes, streams, and how calls are written and read. FOLDER/prompts.jsonl gets the tokens of each prompt, a line each.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hybridmem.chat.commands import serving
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.models import EMBEDDED

CONTEXT_TOKENS = 131_072
TEMPLATE = """\
{{ bos_token }}{% if tools %}<|user|>Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>\
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% elif message.role == 'tool' %}<|user|><tool_response>
{{ message.content }}
</tool_response><|end|>{% else %}<|user|>{{ message.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
_STEP = re.compile(r"\[\[(CALL|SAY|ON) (.*?)\]\]", re.DOTALL)
_RESULT = re.compile(r"</tool_response>|Observation:")
"""Ends the result of a tool, or begins one, as smolagents writes it."""


class Script:
    """Chooses the tokens of the reply that the last prompt with steps prescribes."""

    def __init__(self, tokenizer: Any, prompts: Path) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts

    def __call__(self, logits: Any, plan: list[tuple[Job, int]]) -> list[Chosen | None]:
        return [self._choose(job) if job.wants_choice(n_tokens) else None for job, n_tokens in plan]

    def _choose(self, job: Job) -> Chosen:
        tokens = [int(token_id) for token_id in job.tokens[: job.generation.n_prompt]]
        kind, text = self._step(self._tokenizer.decode(tokens, skip_special_tokens=False))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        n_said = len(job.generation.token_ids)
        if not n_said:
            with self._prompts.open("a") as file:
                print(json.dumps(tokens), file=file)
        if kind == "ON":
            return Chosen(ids[n_said % len(ids)])
        return Chosen(ids[n_said] if n_said < len(ids) else self._tokenizer.eos_token_id)

    def _step(self, prompt: str) -> tuple[str, str]:
        """Return the kind and the text of the next reply."""
        before, mark, behind = prompt.rpartition("[[SAY ")
        if not mark:
            before, mark, behind = prompt.rpartition("[[ON ")
        if not mark:
            return "SAY", "Okay, noted."
        # The steps of one message stand in one turn, which is the last with such steps.
        steps = _STEP.findall(before.rpartition("<|user|>")[2] + mark + behind)
        kind, text = steps[min(len(_RESULT.findall(behind)), len(steps) - 1)]
        if kind != "CALL":
            return kind, text
        call = json.loads(text.replace('\\"', '"'))  # opencode puts what users say into quotation marks.
        return kind, f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def main(folder: Path, *options: str) -> None:
    shutil.copytree(EMBEDDED, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    script = Script(load_tokenizer(folder), folder / "prompts.jsonl")
    serving.Engine = partial(Engine, choose=script, context_tokens=CONTEXT_TOKENS)  # type: ignore[misc]
    from hybridmem.chat.cli import main as run

    sys.argv = ["hybrid-memory", "serve", "--model", str(folder), *options]
    run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
