"""Encoder-decoder models write the encoder's output once.

Every step reads it; it is shared, kept and freed with its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, BartConfig, PreTrainedConfig, PreTrainedModel, T5Config

from hybridmem.memory import BatchError, CapacityError, DropError, HybridMemory, MemorySpec, Sequence, SpecError
from hybridmem.memory.eviction import Recent
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.specs import CrossAttentionSpec
from hybridmem.models import load_model
from hybridmem.models.families.bart import Bart
from hybridmem.models.families.t5 import T5
from tests.extent import one_in
from tests.models.checkpoints import draw_tokens, randomise_
from tests.tolerances import TOLERANCE, assert_logits_close
from tests.toy import Toy

INPUTS = [draw_tokens(n, seed=n) for n in (11, 1, 30, 4)]
TOKENS = [draw_tokens(12, seed=50 + i) for i in range(len(INPUTS))]
BART = {
    "vocab_size": 53, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 40,
}  # fmt: skip
T5_ = {
    "vocab_size": 53, "d_model": 24, "d_kv": 5, "d_ff": 32, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "bart": lambda: BartConfig(**BART),
    "bart-scaled": lambda: BartConfig(
        **BART
        | {
            "scale_embedding": True, "decoder_layers": 1, "encoder_layers": 3, "decoder_attention_heads": 3,
            "encoder_ffn_dim": 20, "activation_function": "relu",
        }
    ),
    "t5": lambda: T5Config(**T5_),
    "t5-gated": lambda: T5Config(**T5_, feed_forward_proj="gated-gelu", num_decoder_layers=3),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    model: Bart | T5
    peer: PreTrainedModel

    def expected(self, i: int, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.peer(torch.tensor([INPUTS[i]]), decoder_input_ids=torch.tensor([tokens])).logits[0]
        return logits

    def memory(self, budget: str = "8MiB") -> HybridMemory:
        return HybridMemory(self.model.memory_spec, budget, rollback_window=4, page_tokens=4, poison=True)

    def open(self, memory: HybridMemory) -> list[Sequence]:
        return [memory.open(encoder=encoded) for encoded in self.model.encode(INPUTS)]

    def feed(self, memory: HybridMemory, requests: dict[Sequence, list[int]]) -> tuple[Tensor, ...]:
        with memory.step(requests, outputs="all") as step:
            rows = step.split(self.model(step))
        memory.check()
        return rows


@pytest.fixture(scope="module", params=one_in(2, CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = tmp_path_factory.mktemp("encoder-decoder")
    torch.manual_seed(5)
    peer = AutoModelForSeq2SeqLM.from_config(CONFIGS[request.param]()).eval()
    randomise_(peer)
    for name, buffer in peer.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_()
    if peer.config.model_type == "t5":  # T5's head is scaled down.
        peer.shared.weight.data.normal_(0, 2.0)
    peer.save_pretrained(folder)
    model = load_model(folder)
    assert isinstance(model, Bart | T5)
    return Pair(model, AutoModelForSeq2SeqLM.from_pretrained(folder).eval())


def test_a_batch_with_inputs_of_all_lengths(pair: Pair) -> None:
    memory = pair.memory()
    sequences = pair.open(memory)
    expected = [pair.expected(i, tokens) for i, tokens in enumerate(TOKENS)]
    assert torch.cat(expected).std() >= 1
    rows = pair.feed(memory, {s: t[: 3 + i] for i, (s, t) in enumerate(zip(sequences, TOKENS, strict=True))})
    for i, own in enumerate(rows):
        assert_logits_close(own, expected[i][: 3 + i])
    for at in range(6, 12):
        chosen = {s: TOKENS[i][s.length : at + 1] for i, s in enumerate(sequences)}
        starts = [s.length for s in sequences]
        for i, own in enumerate(pair.feed(memory, chosen)):
            assert_logits_close(own, expected[i][starts[i] : at + 1])


def test_what_another_encoder_said_would_show(pair: Pair) -> None:
    memory = pair.memory()
    encoded = pair.model.encode(INPUTS)
    wrong = memory.open(encoder=encoded[2])
    (rows,) = pair.feed(memory, {wrong: TOKENS[0]})
    assert float((rows - pair.expected(0, TOKENS[0])).abs().max()) > 100 * TOLERANCE[torch.float32].parity


def test_dropped_tokens_where_positions_are_a_distance_and_where_they_are_in_the_embeddings(pair: Pair) -> None:
    memory = pair.memory()
    a, *_ = pair.open(memory)
    pair.feed(memory, {a: TOKENS[0]})
    if isinstance(pair.model, Bart):
        with pytest.raises(DropError, match="rotation="):
            memory.drop(a, 2, 5)
        assert a.length == 12
    else:
        memory.drop(a, 2, 5)
        assert a.tokens.tolist() == TOKENS[0][:2] + TOKENS[0][5:]
        memory.check()
        (rows,) = pair.feed(memory, {a: [1, 2]})
        assert torch.isfinite(rows).all()


def test_rollback_forks_and_reordering_leave_the_encoder_alone(pair: Pair) -> None:
    memory = pair.memory()
    a, b, *_ = pair.open(memory)
    pair.feed(memory, {a: TOKENS[0][:6], b: TOKENS[1][:5]})
    used = memory.usage().by_kind["encoder pages"]
    fork, mark = memory.fork(a), memory.checkpoint(a)
    assert memory.usage().by_kind["encoder pages"] == used, "forks share"
    pair.feed(memory, {a: [1, 2, 3]})
    memory.rollback(a, to=6)
    (rows,) = pair.feed(memory, {a: TOKENS[0][6:]})
    assert_logits_close(rows, pair.expected(0, TOKENS[0])[6:])
    memory.rollback(a, to=0)
    (rows,) = pair.feed(memory, {a: TOKENS[3]})
    assert memory.usage().by_kind["encoder pages"] == used, "position 0 is not a new sequence"
    assert_logits_close(rows, pair.expected(0, TOKENS[3]))
    memory.rollback(a, to=mark)
    memory.close(mark)
    memory.reorder({a: b, b: a})
    rows = pair.feed(memory, {a: TOKENS[1][5:7], b: TOKENS[0][6:8], fork: TOKENS[0][6:9]})
    assert_logits_close(rows[0], pair.expected(1, TOKENS[1])[5:7])
    assert_logits_close(rows[1], pair.expected(0, TOKENS[0])[6:8])
    assert_logits_close(rows[2], pair.expected(0, TOKENS[0])[6:9])
    with pytest.raises(KeyError), memory.step({a: [1]}) as step:
        pair.model(step)
        raise KeyError
    memory.check()


def test_closing_returns_all_bytes(pair: Pair) -> None:
    memory = pair.memory()
    sequences = pair.open(memory)
    pages = memory.usage().by_kind["encoder pages"] // memory.usage().block_bytes["encoder pages"]
    assert pages == sum(-(-len(ids) // 4) for ids in INPUTS)
    forks = [memory.fork(s) for s in sequences]
    for s in sequences:
        memory.close(s)
    assert memory.usage().by_kind["encoder pages"] == pages * memory.usage().block_bytes["encoder pages"]
    for s in forks:
        memory.close(s)
    memory.check()
    assert memory.usage().used_bytes == 0


def test_chunks_of_a_long_target(pair: Pair) -> None:
    memory = pair.memory()
    (sequence, *_) = pair.open(memory)
    logits = memory.run(pair.model, {sequence: TOKENS[0]}, max_tokens=5, outputs="all")
    assert_logits_close(logits, pair.expected(0, TOKENS[0]))


# The tests below give nonsense.


def test_sequences_and_models_that_do_not_fit(pair: Pair) -> None:
    memory = pair.memory()
    encoded = pair.model.encode(INPUTS[:1])[0]
    with pytest.raises(BatchError, match="encoder="):
        memory.open()
    with pytest.raises(BatchError, match="no encoder"):
        HybridMemory(Toy().memory_spec, "1MiB").open(encoder=encoded)
    (k, v), *rest = encoded
    nonsense = [
        5,
        [None],
        [(k,)] * len(encoded),
        [(k, k, k)],
        iter(encoded),
        [(k[0], v[0]), *rest],
        [(k.to("meta"), v), *rest],
    ]
    for wrong in (*nonsense, [(k.to_sparse(), v), *rest]):
        with pytest.raises(BatchError):
            memory.open(encoder=wrong)
        memory.check()
    for wrong in (
        [*encoded, encoded[0]],
        [(k[:, :1], v), *rest],
        [(k[:0], v[:0]), *rest],
        [(k, v[:-1]), *rest],
        [(k.double(), v), *rest],
    ):
        with pytest.raises(BatchError):
            memory.open(encoder=wrong)
        memory.check()
    assert memory.usage().used_bytes == 0 and not memory.usage().by_sequence
    too_long = [draw_tokens(41)] if isinstance(pair.model, Bart) else []
    for ids in ([], [53], [-1], [0.5], *too_long):
        with pytest.raises(BatchError):
            pair.model.encode([ids])
    if not too_long:
        return  # T5 has no limit for the length of a sequence.
    sequence = memory.open(encoder=encoded)
    with pytest.raises(BatchError, match="40 positions"), memory.step({sequence: draw_tokens(41)}) as step:
        pair.model(step)
    assert sequence.length == 0


def test_policies_and_storages_of_the_decoder(pair: Pair) -> None:
    """The decoder's own attention may have a policy or a storage.

    If scores have a bias by distance, a policy is refused.
    """
    tokens, spec = draw_tokens(20), pair.model.memory_spec
    if isinstance(pair.model, T5):
        with pytest.raises(SpecError, match="bias by distance, which needs every row"):
            spec.with_policy(Recent(64))
    else:
        spec = spec.with_policy(Recent(64))

    def last_logits(spec: MemorySpec) -> Tensor:
        memory = HybridMemory(spec, "4MiB", page_tokens=4, rollback_window=4, poison=True)
        sequence = memory.open(encoder=pair.model.encode(INPUTS[:1])[0])
        for token in tokens:
            with memory.step({sequence: [token]}) as step:
                logits: Tensor = pair.model(step)
        return logits[0]

    expected = pair.expected(0, tokens)[-1]
    assert_logits_close(last_logits(spec), expected)
    in_bits = last_logits(spec.with_storage(Quantized(8, group=8)))
    assert 0 < float((in_bits - expected).square().mean().sqrt()) < 0.05 * float(expected.std())


def test_no_room_for_an_encoder(pair: Pair) -> None:
    memory = pair.memory("24KiB")
    (encoded,) = pair.model.encode([draw_tokens(40)])
    opened = []
    with pytest.raises(CapacityError):
        while True:
            opened.append(memory.open(encoder=encoded))
    memory.check()
    assert len(memory.usage().by_sequence) == len(opened)
    for s in opened:
        memory.close(s)
    assert memory.usage().used_bytes == 0
    with pytest.raises(SpecError):
        CrossAttentionSpec(3, 2, 8)
