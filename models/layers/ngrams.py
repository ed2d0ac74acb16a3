"""Implements embeddings of n-grams: the last tokens choose rows of a table by hashes, which are added to the streams.

The last tokens are remembered as the window of a convolution by which each token reads those before it. Token ids do
not fit into 16-bit floats, so three digits stand for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.kernels import steady
from hybridmem.memory.recurrences import CausalConv, ShortConv, short_conv_spec
from hybridmem.models.layers.hyper_connection import load_stream_norm
from hybridmem.models.layers.linear import Linear
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.coded import as_floats

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAST, LOCAL = "last tokens", "local"
_DIGITS = (0, 8, 16)
"""By how many bits an id is shifted for each of its digits, which are below 256: so many are exact in 16-bit floats."""


class LastTokens:
    """Gives each token the ids of the tokens before it in its sequence.

    Args:
        n_before: how many tokens before each are wanted.
        dtype, device: of the memory.
    """

    def __init__(self, layer: int, n_before: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layer, self._n_before, self._dtype = layer, n_before, dtype
        weight_WE = torch.zeros(n_before + 1, n_before, len(_DIGITS), dtype=dtype, device=device)
        for distance in range(1, n_before + 1):
            weight_WE[n_before - distance, distance - 1] = 1
        self._recurrence = ShortConv(CausalConv(weight_WE.flatten(1), activation=False))
        self._shifts = torch.tensor(_DIGITS, device=device)
        self.spec: RecurrentSpec = short_conv_spec(n_before * len(_DIGITS), n_before + 1, _LAST)

    def __call__(self, step: Step) -> Tensor:
        """Return (T, n_before) ids, the newest first. -1 stands for what is before the first token."""
        # Digits are those of the id plus 1, because a window begins with zeros, which must be no token.
        digits_TD = ((step.token_ids[:, None] + 1) >> self._shifts) & 255
        rows = digits_TD.to(self._dtype).repeat(1, self._n_before)
        found = step.recur(self._layer, rows, self._recurrence, name=_LAST)
        digits = found.to(torch.int64).view(len(rows), self._n_before, len(_DIGITS))
        return (digits << self._shifts).sum(-1) - 1


@dataclass(frozen=True)
class NgramHashes:
    """Computes which rows of the table stand for the n-grams that end at each token.

    Attributes:
        eos: the token at which n-grams end.
        factors: an odd factor for each token of an n-gram, the newest first.
        sizes, begins: how many rows each head has, and the first of them; heads of short n-grams come first.
    """

    eos: int
    factors: Tensor
    sizes: Tensor
    begins: Tensor

    @staticmethod
    def load(config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str, number: int) -> tuple[NgramHashes, int]:
        """Return the hashes of a layer, and how many rows its table has.

        Args:
            number: the number of the layer among those with n-grams, from 0 on.
        """
        eos, n = config.eos_token_id, config.ngram_size
        n_all = (n - 1) * config.heads_per_ngram
        sizes = _primes_from(config.ngram_vocab_size_base, number * n_all, n_all)
        divisor = config.make_ngram_vocab_size_divisible_by

        def buffer(name: str, values: Sequence[int]) -> Tensor:
            """Return a buffer of the checkpoint, or these values if no file holds it."""
            name = f"{prefix}.{name}"
            if name in checkpoint:
                return checkpoint.take_as_stored(name, len(values)).to(checkpoint.device)
            return torch.tensor(values, device=checkpoint.device)

        hashes = NgramHashes(
            int(eos[0] if isinstance(eos, list) else eos),
            buffer("layer_multipliers", _factors(config.vocab_size, n, config.seed, number)),
            buffer("ngram_heads_vocab_sizes", sizes),
            buffer("ngram_heads_offsets", [sum(sizes[:i]) for i in range(n_all)]),
        )
        return hashes, math.ceil(sum(sizes) / divisor) * divisor

    @property
    def n_before(self) -> int:
        """Return how many tokens before each one an n-gram has at most."""
        return len(self.factors) - 1

    def __call__(self, ids_T: Tensor, before_TN: Tensor) -> Tensor:
        """Return (T, heads) rows for tokens and the ids before them. N-grams end at an end-of-sequence token."""
        mixed_T, rows = ids_T * self.factors[0], list[Tensor]()
        is_over_TN = ((before_TN == self.eos) | (before_TN < 0)).cumsum(1) > 0
        before_TN = before_TN.masked_fill(is_over_TN, self.eos)
        for i, sizes in enumerate(self.sizes.chunk(self.n_before)):
            mixed_T = mixed_T ^ (before_TN[:, i] * self.factors[i + 1])
            rows.append(mixed_T[:, None] % sizes)
        return torch.cat(rows, 1) + self.begins


def conv_with_gaps(taps_EW: Tensor, n_gap: int) -> ShortConv:
    """Return a convolution over every `n_gap`-th token, with SiLU."""
    n_channels, n_taps = taps_EW.shape
    weight_WE = taps_EW.new_zeros((n_taps - 1) * n_gap + 1, n_channels)
    weight_WE[::n_gap] = taps_EW.T
    return ShortConv(CausalConv(weight_WE))


class NgramEmbedding:
    """Adds features of n-grams to residual streams: `y = ngrams(x, step)`, both (T, S M).

    Each stream gates the features by their agreement with itself. A convolution with gaps mixes those of near tokens.
    """

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str, layer: int, number: int) -> None:
        n_model, n_streams, n_in, take = config.hidden_size, config.hc_count, config.ple_embed_dim, checkpoint.take
        n_all, n_gap, n_taps = n_streams * n_model, config.ngram_size, config.ple_conv_kernel_size
        if n_taps < 2:
            raise UnsupportedModelError(f"ple_conv_kernel_size={n_taps}; implemented are two taps and more")
        embedding = f"{prefix}.ple_embedding"
        self._hashes, n_rows = NgramHashes.load(config, checkpoint, embedding, number)
        n_heads = (config.ngram_size - 1) * config.heads_per_ngram
        self._shards = _take_shards(checkpoint, f"{embedding}.ngram_embedding", n_rows, n_in // n_heads)
        self._last = LastTokens(layer, config.ngram_size - 1, checkpoint.dtype, checkpoint.device)
        self._key = Linear.load(checkpoint, f"{prefix}.key_proj", n_all, n_in)
        self._value = Linear.load(checkpoint, f"{prefix}.value_proj", n_model, n_in)
        self._key_norm, self._query_norm, self._conv_norm = (
            load_stream_norm(checkpoint, f"{prefix}.norm_{name}", n_streams, n_model, config.rms_norm_eps)
            for name in ("key", "query", "conv")
        )
        self._conv = conv_with_gaps(take(f"{prefix}.conv1d.weight", n_all, 1, n_taps)[:, 0], n_gap)
        self._layer, self._n_streams, self._dtype = layer, n_streams, checkpoint.dtype
        self._sigmoid = steady(torch.sigmoid)
        local = short_conv_spec(n_all, (n_taps - 1) * n_gap + 1, LOCAL)
        self.specs: tuple[RecurrentSpec, ...] = (self._last.spec, local)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        features = self._look_up(self._hashes(step.token_ids, self._last(step)))
        shape = len(x_TM), self._n_streams, -1
        agreement = (self._key_norm(self._key(features)) * self._query_norm(x_TM)).view(shape)
        gate_TS1 = agreement.sum(-1, keepdim=True) * agreement.shape[-1] ** -0.5
        gate_TS1 = self._sigmoid(gate_TS1.abs().clamp_min(1e-6).sqrt() * gate_TS1.sign())
        y_TE = (gate_TS1 * self._value(features)[:, None]).flatten(1)
        return y_TE + step.recur(self._layer, self._conv_norm(y_TE), self._conv, name=LOCAL)

    def _look_up(self, rows_TN: Tensor) -> Tensor:
        """Return these rows of the table, one after the other for each token. Each shard gives its own."""
        rows, begin = rows_TN.flatten(), 0
        found = torch.empty(len(rows), self._shards[0].shape[1], dtype=self._dtype, device=rows.device)
        for shard in self._shards:
            is_own = (rows >= begin) & (rows < begin + len(shard)) if len(self._shards) > 1 else slice(None)
            found[is_own] = shard[rows[is_own] - begin].to(self._dtype)
            begin += len(shard)
        return found.view(len(rows_TN), -1)


def _take_shards(checkpoint: Checkpoint, prefix: str, n_rows: int, size: int) -> list[Tensor]:
    """Take a table as its shards. They stay mapped from the file: a table may be larger than memory."""
    names = checkpoint.names_below([f"{prefix}.shard_"])
    names.sort(key=lambda name: int(name.removeprefix(f"{prefix}.shard_").removesuffix(".weight")))
    shards = checkpoint.take_parts_as_stored(names or [f"{prefix}.weight"], n_rows, size)
    return [as_floats(shard).to(checkpoint.device) for shard in shards]


def _primes_from(least: int, n_skipped: int, n: int) -> list[int]:
    """Return n primes, from `least` on, after the first `n_skipped`."""
    found, value = list[int](), max(2, least)
    while len(found) < n_skipped + n:
        if all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            found.append(value)
        value += 1
    return found[n_skipped:]


_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _factors(vocab_size: int, n: int, seed: int, number: int) -> list[int]:
    """Return the odd factors of n tokens, drawn by SplitMix64 (Steele et al. 2014) so that products stay below 2^63."""
    half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    found = list[int]()
    for i in range(1, n + 1):
        x = (seed + 10007 * number + _GOLDEN * (i + 1)) & _WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        found.append(2 * ((x ^ (x >> 31)) % half) + 1)
    return found
