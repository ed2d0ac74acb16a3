"""Trains the embedded checkpoint: a small Jamba that remembers what it is told.

    python -m training.train_embedded --out models/embedded

The model class and the file layout are transformers' own; while training, `training.fused` computes its loss.
All random choices are seeded. `training.evaluate` measures what the model remembers, on words that training never
shows.
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

from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.simulation.dialogues import Turn, make_dialogue, messages
from hybridmem.models import load_model
from training.evaluate import evaluate
from training.facts import make_echo_dialogue, make_facts_dialogue
from training.fused import loss_of
from training.words import Words

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
class Phase:
    """Says of which dialogues the batches are made in a part of a stage.

    Attributes:
        until: the phase ends when this share of the stage's steps is done.
        n_tokens, n_dialogues: tokens of each dialogue, and dialogues of each batch.
        spelt: share of dialogues about facts with words of any letters (`training.facts`); the others are the demo's.
        echoes: share of dialogues in which the model repeats what it was just told.
        invented: share of names in the demo's dialogues that are made up.
        talk: the possible shares of small talk in a dialogue.
        asks: share of questions among the turns without small talk, in dialogues with words of any letters.
        most_facts: how many facts such dialogues have at most.
        changes, alike, numbers, unknown: see `training.facts.make_facts_dialogue`.
    """

    until: float
    n_tokens: int
    n_dialogues: int
    spelt: float = 0.0
    echoes: float = 0.0
    invented: float = 0.0
    talk: tuple[float, ...] = (0.1, 0.35, 0.6)
    asks: float = 0.5
    most_facts: int = 7
    changes: float = 0.25
    alike: float = 0.0
    numbers: float = 0.0
    unknown: float = 0.1


@dataclass(frozen=True)
class Stage:
    """Holds a stage of training. The learning rate rises to a peak, stays, and falls in the last half of the steps."""

    steps: int
    peak_rate: float
    phases: tuple[Phase, ...]


STAGES = (
    # Short dialogues come first; with long ones the model never begins to learn recall.
    Stage(3000, 2e-3, (Phase(0.25, 128, 32), Phase(0.45, 256, 16), Phase(1.0, 576, 8))),
    # Then come made-up names. Memorized pairs do not help there, so the model learns to read names from the dialogue.
    Stage(700, 1e-3, (Phase(0.4, 256, 16, invented=0.3), Phase(1.0, 576, 8, invented=0.3))),
    # Then come words of any letters. Dialogues that repeat what was just said teach the copying of several tokens
    # fastest. Without them, the model needs many times as many steps before it begins to copy.
    Stage(
        3600,
        2e-3,
        (
            Phase(0.21, 72, 16, spelt=0.63, echoes=0.35, talk=(0.0, 0.0, 0.15), asks=0.6, most_facts=3),
            Phase(0.38, 128, 10, spelt=0.81, echoes=0.12, talk=(0.0, 0.15, 0.35), most_facts=6),
            Phase(0.51, 200, 6, spelt=0.84, echoes=0.05, invented=0.3, talk=(0.0, 0.2, 0.5)),
            Phase(0.72, 256, 10, spelt=0.82, echoes=0.03, invented=0.3, talk=(0.0, 0.2, 0.5)),
            Phase(0.87, 320, 8, spelt=0.69, echoes=0.02, invented=0.3, talk=(0.0, 0.25, 0.55)),
            Phase(1.0, 224, 12, spelt=0.81, echoes=0.01, invented=0.3, talk=(0.0, 0.15, 0.45), most_facts=5),
        ),
    ),
    # Then comes what the model still gets wrong at times: a fact that changed several times, and several facts of one
    # kind.
    Stage(
        2400,
        1e-3,
        (
            Phase(0.5, 192, 14, 0.85, 0.01, 0.3, (0.0, 0.1, 0.3), asks=0.45, most_facts=5, changes=0.5, alike=0.5),
            Phase(0.8, 288, 9, 0.8, 0.01, 0.3, (0.0, 0.2, 0.5), asks=0.45, most_facts=7, changes=0.5, alike=0.5),
            Phase(1.0, 224, 12, 0.8, 0.01, 0.3, (0.0, 0.15, 0.5), asks=0.45, most_facts=6, changes=0.4, alike=0.4),
        ),
    ),
    # Numbers and colours are learnt last.
    Stage(
        3600,
        1e-3,
        (
            Phase(0.4, 224, 12, 0.9, 0.02, 0.3, (0.0, 0.15, 0.4), 0.45, 6, changes=0.45, alike=0.4, numbers=0.35),
            Phase(0.75, 320, 8, 0.85, 0.02, 0.3, (0.0, 0.3, 0.6), 0.45, 7, changes=0.45, alike=0.4, numbers=0.35),
            Phase(1.0, 256, 11, 0.85, 0.02, 0.3, (0.0, 0.2, 0.6), 0.45, 6, changes=0.45, alike=0.4, numbers=0.35),
        ),
    ),
    # Last come questions for what was never told, which are rare in the earlier stages.
    Stage(
        2400,
        7e-4,
        (
            Phase(0.6, 224, 12, 0.7, 0.01, 0.3, (0.0, 0.15, 0.5), 0.5, 6, 0.4, 0.4, numbers=0.2, unknown=0.3),
            Phase(1.0, 288, 9, 0.7, 0.01, 0.3, (0.0, 0.2, 0.6), 0.5, 6, 0.4, 0.4, numbers=0.2, unknown=0.3),
        ),
    ),
)
TOKENS_PER_TURN = 16
"""At least on average: dialogues are cut where they are longer than a batch."""
IGNORED = -100


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
        # Time steps are from 0.001 to 0.1, as in mamba-ssm. Transformers would leave them near 0.7.
        if hasattr(layer, "mamba"):
            dt = torch.exp(torch.empty_like(layer.mamba.dt_proj.bias).uniform_(-6.9, -2.3))
            layer.mamba.dt_proj.bias.data = dt + torch.log(-torch.expm1(-dt))
    return model


def encode(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """Return the token ids of a dialogue and, for each, its label.

    All tokens of replies have labels to learn; tokens of user messages have none.
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
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, words: Words, phase: Phase
) -> tuple[Tensor, Tensor]:
    """Make the ids and labels of a batch, each (n_dialogues, n_tokens)."""
    batch_ids, batch_labels = [], []
    for _ in range(phase.n_dialogues):
        n_turns, talk = max(3, phase.n_tokens // TOKENS_PER_TURN + 2), rng.choice(phase.talk)
        roll = rng.random()
        if roll < phase.echoes:
            turns = make_echo_dialogue(rng, words, n_turns)
        elif roll < phase.echoes + phase.spelt:
            most_facts = rng.randint(1, phase.most_facts)
            turns = make_facts_dialogue(
                rng, words, n_turns, talk=talk, asks=phase.asks, most_facts=most_facts, changes=phase.changes,
                alike=phase.alike, numbers=phase.numbers, unknown=phase.unknown,
            )  # fmt: skip
        else:
            turns = make_dialogue(rng, n_turns, talk=talk, invented=phase.invented)
        ids, labels = encode(tokenizer, turns)
        padding = [IGNORED] * max(0, phase.n_tokens - len(labels))
        batch_labels.append((labels + padding)[: phase.n_tokens])
        batch_ids.append((ids + [0] * len(padding))[: phase.n_tokens])
    return torch.tensor(batch_ids), torch.tensor(batch_labels)


def run_stage(stage: Stage, model: JambaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train the model in place, and report on standard output."""
    rng, started = random.Random(seed), time.monotonic()
    words = Words(rng, tuple(tokenizer.decode([i]) for i in range(len(SPECIAL_TOKENS), len(tokenizer))))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.peak_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    for step in range(1, stage.steps + 1):
        share = step / stage.steps
        phase = next(phase for phase in stage.phases if share <= phase.until)
        for group in optimizer.param_groups:
            group["lr"] = stage.peak_rate * min(1, step / 100) * min(1, 2 * (1 - share) + 0.02)
        loss = loss_of(model, *make_batch(tokenizer, rng, words, phase))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            minutes = round((time.monotonic() - started) / 60, 1)
            report = {"step": step, "minutes": minutes, "tokens": phase.n_tokens, "loss": round(loss.item(), 4)}
            print(json.dumps(report), flush=True)


def train(
    out: Annotated[Path, typer.Option(help="folder the checkpoint is written to")] = Path("models/embedded"),
    seed: int = 0,
    threads: int = 1,
    resume: Annotated[
        Path | None, typer.Option(help="a checkpoint of the stage before the last one; only the last one is run")
    ] = None,
    questions: Annotated[int, typer.Option(help="asked at the end, of each kind of word in each situation")] = 400,
) -> None:
    """Train, measure on words that training never showed, and write checkpoints of the model and of earlier stages."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    tokenizer = make_tokenizer(seed)
    model = make_model(len(tokenizer)) if resume is None else JambaForCausalLM.from_pretrained(resume)
    first = 0 if resume is None else len(STAGES) - 1
    for i, stage in list(enumerate(STAGES))[first:]:
        started = time.monotonic()
        run_stage(stage, model.train(), tokenizer, seed + 1 + i)
        folder = out if i == len(STAGES) - 1 else out.with_name(f"{out.name}-stage-{i + 1}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report = {"seed": seed, "stage": i + 1, "steps": stage.steps, "minutes": (time.monotonic() - started) / 60}
        report["right"] = evaluate(load_model(folder), load_tokenizer(folder), questions, seed=0)
        print(json.dumps(report), flush=True)
        (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(train)
