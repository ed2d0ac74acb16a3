"""Trains the draft head of the embedded model: two layers that draft several tokens at once (DFlash).

    python -m training.train_head --model models/embedded --out models/embedded/draft_head

The model stays as it is. The head learns to say the next tokens of replies from the model's hidden states, in
dialogues like those on which the model was trained. Its class is transformers' own, and its files are named as the
authors of DFlash name theirs. All random choices are seeded. At the end, the engine drafts replies to questions about
held-out words, and the share of accepted tokens is written beside the weights.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedTokenizerFast

from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer, encode_chat, load_tokenizer
from hybridmem.chat.simulation.dialogues import make_dialogue, messages
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
from hybridmem.models.draft_heads import HiddenRows
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.loading.draft_heads import load_draft_head
from training.train_embedded import IGNORED, SPECIAL_TOKENS, Phase, make_batch
from training.words import Words

N_BLANKS, N_DRAFTS, N_TIMES = 8, 32, 3
"""Blanks of a draft, the token before them included; how many drafts of each dialogue are learnt in a step; and in how
many steps the states of a batch are used, because computing them takes as long as learning from them.
"""
READS = [1, 4, 5]
"""The model's layers after which the head reads: those with attention, and the last one."""
PEAK_RATE, DECAY = 3e-3, 4.0
"""The learning rate, and the number of tokens over which the weight of a later token falls by a factor of e."""
PHASES = (
    Phase(0.5, 192, 8, 0.5, 0.02, 0.2, (0.0, 0.15, 0.4), 0.5, 6, 0.4, 0.3, numbers=0.2, unknown=0.2),
    Phase(1.0, 256, 6, 0.5, 0.02, 0.2, (0.0, 0.2, 0.6), 0.5, 6, 0.4, 0.3, numbers=0.2, unknown=0.2),
)


def make_head(model: Decoder) -> MuseGlimmerAssistantModel:
    """Make the head of 148,000 parameters. An unused token stands for those that are drafted."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=model.config.hidden_size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=model.config.rms_norm_eps, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, layer_types=["full_attention"] * 2,
        sliding_window=4096, block_size=N_BLANKS, mask_token_id=0, target_layer_ids=READS, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return MuseGlimmerAssistantModel(config)


class States:
    """Computes the hidden states that the head reads, without gradients."""

    def __init__(self, model: Decoder) -> None:
        last = len(model.memory_spec.layers) - 1
        self._rows = HiddenRows(model, tuple(i for i in READS if i != last))
        self._memory = HybridMemory(model.memory_spec, "1GiB")

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Return what the head reads of each token, the rows of several layers: (B, T, len(READS) * M)."""
        sequences = [self._memory.open() for _ in ids_BT]
        with self._memory.step(dict(zip(sequences, ids_BT.tolist(), strict=True))) as step:
            _, rows_TR = self._rows(step)
            rows = step.select(rows_TR, "all")
        for sequence in sequences:
            self._memory.close(sequence)
        return rows.view(*ids_BT.shape, -1)


def choose_anchors(labels_BT: Tensor, generator: torch.Generator) -> Tensor:
    """Return (B, N_DRAFTS) positions of tokens of replies that another token of the reply follows."""
    is_anchor = (labels_BT[:, :-1] != IGNORED) & (labels_BT[:, 1:] != IGNORED)
    return torch.multinomial(is_anchor.float() + 1e-9, N_DRAFTS, generator=generator)


def loss_of(
    head: MuseGlimmerAssistantModel, embedding_VM: Tensor, states_BTR: Tensor, ids_BT: Tensor, labels_BT: Tensor,
    anchors_BN: Tensor,
) -> Tensor:  # fmt: skip
    """Return the mean cross entropy of the tokens after the anchors, up to the end of their replies.

    Drafts of a dialogue are computed together. Blanks see the states before their anchor, and each other.
    """
    (n_dialogues, n_tokens), steps = ids_BT.shape, torch.arange(N_BLANKS)
    places_BQ = (anchors_BN[..., None] + steps).flatten(1)
    draft_Q = torch.arange(N_DRAFTS).repeat_interleave(N_BLANKS)
    is_before_BQT = torch.arange(n_tokens) < anchors_BN[:, draft_Q, None]
    is_own_BQQ = (draft_Q[:, None] == draft_Q).expand(n_dialogues, -1, -1)
    seen = torch.cat([is_before_BQT, is_own_BQQ], -1)[:, None]
    tokens_BNS = torch.full((n_dialogues, N_DRAFTS, N_BLANKS), head.config.mask_token_id)
    tokens_BNS[..., 0] = ids_BT.gather(1, anchors_BN)
    out_BQM = head(
        noise_embeds=embedding_VM[tokens_BNS.flatten(1)], context_hidden_states=states_BTR,
        attention_mask={"full_attention": seen},
        position_ids=torch.cat([torch.arange(n_tokens).expand(n_dialogues, -1), places_BQ], 1),
    ).last_hidden_state  # fmt: skip
    labels_BNS = F.pad(labels_BT, (0, N_BLANKS), value=IGNORED).gather(1, places_BQ).view_as(tokens_BNS)
    is_known_BNS = (labels_BNS != IGNORED).cumprod(-1).bool()[..., 1:]  # A draft ends with its reply.
    weight_BNS = torch.exp(-(steps[1:] - 1) / DECAY).expand_as(is_known_BNS)
    logits = out_BQM.view(*tokens_BNS.shape, -1)[:, :, 1:][is_known_BNS] @ embedding_VM.T
    losses = F.cross_entropy(logits, labels_BNS[..., 1:][is_known_BNS], reduction="none")
    weights = weight_BNS[is_known_BNS]
    return (losses * weights).sum() / weights.sum()


def learn(
    head: MuseGlimmerAssistantModel, model: Decoder, tokenizer: PreTrainedTokenizerFast, n_steps: int, seed: int
) -> None:
    """Train the head in place, and report on standard output."""
    rng, generator, started = random.Random(seed), torch.Generator().manual_seed(seed), time.monotonic()
    words = Words(rng, tuple(tokenizer.decode([i]) for i in range(len(SPECIAL_TOKENS), len(tokenizer))))
    states, embedding_VM = States(model), model.vocabulary.embed(torch.arange(model.memory_spec.vocab_size))
    optimizer = torch.optim.AdamW(head.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(1, n_steps + 1):
        share = step / n_steps
        phase = next(phase for phase in PHASES if share <= phase.until)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1, step / 100) * min(1, 1.5 * (1 - share) + 0.02)
        if step % N_TIMES == 1:
            ids_BT, labels_BT = make_batch(tokenizer, rng, words, phase)
            states_BTR = states(ids_BT)
        loss = loss_of(head, embedding_VM, states_BTR, ids_BT, labels_BT, choose_anchors(labels_BT, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            minutes = round((time.monotonic() - started) / 60, 1)
            print(json.dumps({"step": step, "minutes": minutes, "loss": round(loss.item(), 4)}), flush=True)


def write_head(head: MuseGlimmerAssistantModel, folder: Path) -> None:
    """Write a head in bfloat16. Its config has the type of Qwen3's, which older versions of transformers know."""
    own = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    tensors = {own.get(name, name): x.detach().to(torch.bfloat16) for name, x in head.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sizes = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "rope_parameters", "layer_types", "max_position_embeddings",
    )  # fmt: skip
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "dtype": "bfloat16", **{name: getattr(head.config, name) for name in sizes},
        "dflash_config": {
            "block_size": N_BLANKS, "mask_token_id": head.config.mask_token_id, "target_layer_ids": READS,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def accepted_share(model: Decoder, tokenizer: Tokenizer, folder: Path, n_dialogues: int = 100) -> dict[str, float]:
    """Return the share of drafted tokens that are accepted, and tokens a step, where each step drafts all it can."""
    head = load_draft_head(folder, model)
    drafter = BlankDrafter(model, head, HybridMemory(head.memory_spec, "64MiB", rollback_window=2 * N_BLANKS))
    memory = HybridMemory(model.memory_spec, "256MiB", rollback_window=2 * N_BLANKS)
    engine = Engine(model, memory, tokenizer, speculation=Speculation(adapts=False, drafter=drafter))
    rng, n_tokens = random.Random(f"{n_dialogues} dialogues"), 0
    for _ in range(n_dialogues):
        turns = make_dialogue(rng, rng.choice((2, 6, 12)), held_out=True)
        generation = engine.submit(encode_chat(tokenizer, [*messages(turns)[:-1]]), max_tokens=40)
        engine.run()
        n_tokens += len(generation.token_ids)
    stats = engine.stats
    return {"accepted": stats.n_accepted / stats.n_drafted, "tokens a step": n_tokens / stats.n_steps}


def train(
    model: Annotated[Path, typer.Option(help="folder of the model that the head is for")] = Path("models/embedded"),
    out: Annotated[Path, typer.Option(help="folder the head is written to")] = Path("models/embedded/draft_head"),
    steps: int = 2400,
    seed: int = 0,
    threads: int = 1,
) -> None:
    """Train a head, write it in bfloat16, and measure how many of its drafts are accepted."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    loaded = load_model(model)
    assert isinstance(loaded, Decoder), "a Jamba is one"
    started, head = time.monotonic(), make_head(loaded)
    learn(head.train(), loaded, PreTrainedTokenizerFast.from_pretrained(model), steps, seed + 1)
    write_head(head, out)
    report = {"seed": seed, "steps": steps, "minutes": (time.monotonic() - started) / 60}
    report |= accepted_share(loaded, load_tokenizer(model), out)
    print(json.dumps(report), flush=True)
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(train)
