"""Trains the embedded checkpoint: a small Jamba that remembers what it is told.

    python -m training.train_embedded --out models/embedded

The model class and the file layout are transformers' own; only its selective scan, a Python loop, is replaced while
training. Everything is seeded: 3,700 steps, about 45 minutes on 2 busy cores. Accuracy is measured on (topic, value)
pairs never trained on.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM, PreTrainedTokenizerFast
from transformers.models.jamba import modeling_jamba

from chat.simulation.dialogues import Turn, make_dialogue, messages
from training.scan import selective_scan

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}<|user|>{{ message.content }}<|end|><|assistant|>Okay, noted.<|end|>"
    "{% elif message.role in ['user', 'tool'] %}<|user|>{{ message.content }}<|end|>"
    "{% elif message.role == 'assistant' %}"
    "<|assistant|>{{ message.content or ('Okay, noted.' if message.tool_calls else '') }}<|end|>"
    "{% else %}{{ raise_exception('this model knows only the roles system, user, assistant and tool') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A system message is a turn that the model notes, and so is what a tool returned: it was trained on such turns."""


@dataclass(frozen=True)
class Stage:
    """Holds a stage of training.

    `curriculum`: (until this share of the steps, tokens a dialogue, dialogues a batch); `invented`: share of made-up
    names.
    """

    steps: int
    peak_rate: float
    invented: float
    curriculum: tuple[tuple[float, int, int], ...]


STAGES = (
    # Short dialogues come first; with long ones the model never begins to learn recall.
    Stage(3000, 2e-3, 0.0, ((0.25, 128, 32), (0.45, 256, 16), (1.0, 576, 8))),
    # Then made-up names: knowing pairs by heart does not help there, so the model learns to read them.
    Stage(700, 1e-3, 0.3, ((0.4, 256, 16), (1.0, 576, 8))),
)
TOKENS_PER_TURN = 19
IGNORED = -100
DISTANCES = ((0, "unknown"), (100, "1-100"), (200, "101-200"), (400, "201-400"), (1 << 30, ">400"))


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 1,024 tokens on 3,000 dialogues.

    Most words are one token, and any text can be written.
    """
    rng = random.Random(seed)
    texts = (m["content"] for _ in range(3000) for m in messages(make_dialogue(rng, 20, held_out=None)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(vocab_size: int) -> JambaForCausalLM:
    """Make the model of 1.2 million parameters: attention in layers 1 and 4, Mamba in the other four."""
    config = JambaConfig(
        vocab_size=vocab_size, tie_word_embeddings=True, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, attn_layer_period=3, attn_layer_offset=1, num_experts=1,
        num_experts_per_tok=1, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8,
        max_position_embeddings=4096, initializer_range=0.05, use_associative_scan=False,
    )  # fmt: skip
    model = JambaForCausalLM(config)
    for layer in model.model.layers:
        # time steps from 0.001 to 0.1, as mamba-ssm initialises them; transformers leaves them near 0.7
        if hasattr(layer, "mamba"):
            dt = torch.exp(torch.empty_like(layer.mamba.dt_proj.bias).uniform_(-6.9, -2.3))
            layer.mamba.dt_proj.bias.data = dt + torch.log(-torch.expm1(-dt))
    return model


def encode(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """Return the token ids of a dialogue and, for each, its label.

    Replies are learnt in full, user text is not.
    """
    ids, labels = [tokenizer.bos_token_id], [IGNORED]
    user, assistant, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
    for turn in turns:
        asked = [user, *tokenizer.encode(turn.user), end, assistant]
        replied = [*tokenizer.encode(turn.reply), end]
        ids += asked + replied
        labels += [IGNORED] * len(asked) + replied
    return ids, labels


def make_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, invented: float, n_tokens: int, n_dialogues: int
) -> tuple[Tensor, Tensor]:
    batch_ids, batch_labels = [], []
    for _ in range(n_dialogues):
        n_turns, talk = max(4, n_tokens // TOKENS_PER_TURN + 3), rng.choice((0.1, 0.35, 0.6))
        turns = make_dialogue(rng, n_turns, talk=talk, invented=invented)
        ids, labels = encode(tokenizer, turns)
        padding = [IGNORED] * max(0, n_tokens - len(labels))
        batch_labels.append((labels + padding)[:n_tokens])
        batch_ids.append((ids + [0] * len(padding))[:n_tokens])
    return torch.tensor(batch_ids), torch.tensor(batch_labels)


@torch.no_grad()
def measure(
    model: JambaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, n_dialogues: int, invented: float = 0.0
) -> dict[str, float]:
    """Return the share of held-out questions answered without one wrong token, by distance.

    Distance is the number of tokens from the last mention of the fact.
    """
    rng, right, asked = random.Random(seed), {}, {}
    model.eval()
    for _ in range(n_dialogues):
        turns = make_dialogue(rng, 24, held_out=True, talk=0.4, invented=invented)
        ids, labels = encode(tokenizer, turns)
        best = model(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()
        position, told_at = 1, {}
        for turn in turns:
            n_user, n_reply = len(tokenizer.encode(turn.user)) + 3, len(tokenizer.encode(turn.reply)) + 1
            start, position = position + n_user, position + n_user + n_reply
            if turn.is_question:
                distance = start - told_at[turn.topic] if turn.topic in told_at else 0
                bin_name = next(name for limit, name in DISTANCES if distance <= limit)
                is_right = all(best[i - 1] == labels[i] for i in range(start, position))
                for name in (bin_name, "all <= 400") if bin_name != ">400" else (bin_name,):
                    right[name] = right.get(name, 0) + is_right
                    asked[name] = asked.get(name, 0) + 1
            if turn.value is not None:
                told_at[turn.topic] = position
    model.train()
    return {name: right[name] / asked[name] for name in sorted(asked)} | {"questions": sum(asked.values())}


def run_stage(stage: Stage, model: JambaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train in place, reporting on standard output."""
    rng, started = random.Random(seed), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, stage.steps + 1):
        share = step / stage.steps
        n_tokens, n_dialogues = next((t, b) for until, t, b in stage.curriculum if share <= until)
        ids, labels = make_batch(tokenizer, rng, stage.invented, n_tokens, n_dialogues)
        for group in optimizer.param_groups:
            group["lr"] = stage.peak_rate * min(1, step / 100) * min(1, 2 * (1 - share) + 0.02)
        loss = model(ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            minutes = round((time.monotonic() - started) / 60, 1)
            report = {"step": step, "minutes": minutes, "tokens": n_tokens, "loss": round(float(loss), 4)}
            report |= measure(model, tokenizer, seed=10_000 + step, n_dialogues=20) if step % 500 == 0 else {}
            print(json.dumps(report), flush=True)


def train(
    out: Annotated[Path, typer.Option(help="folder the checkpoint is written to")] = Path("models/embedded"),
    seed: int = 0,
    threads: int = 2,
    resume: Annotated[
        Path | None, typer.Option(help="a checkpoint of the first stage; only the second one is run")
    ] = None,
) -> None:
    """Train, measure on held-out dialogues, and write the checkpoint (and one of the first stage beside it)."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    modeling_jamba.mamba_selective_scan = selective_scan
    tokenizer = make_tokenizer(seed)
    model = make_model(len(tokenizer)) if resume is None else JambaForCausalLM.from_pretrained(resume)
    first = 0 if resume is None else 1
    for i, stage in list(enumerate(STAGES))[first:]:
        run_stage(stage, model.train(), tokenizer, seed + 1 + i)
        measured = {
            name: measure(model, tokenizer, 99, 300, invented)
            for name, invented in (("held_out", 0.0), ("made_up", 1.0))
        }
        print(json.dumps(measured), flush=True)
        folder = out if i == len(STAGES) - 1 else out.with_name(f"{out.name}-stage-{i + 1}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps({"seed": seed, "accuracy": measured}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(train)
