"""Defines the recurrences, one file per family: the shapes of rows and states, and functions that advance states."""

from hybridmem.memory.recurrences.convolution import CausalConv, ShortConv, short_conv_spec, window_tensors
from hybridmem.memory.recurrences.delta_rule import DeltaRule, DeltaRuleShape
from hybridmem.memory.recurrences.fold import Fold
from hybridmem.memory.recurrences.gated_pool import GatedPool, gated_pool_spec
from hybridmem.memory.recurrences.linear_attention import LinearAttention, linear_attention_spec
from hybridmem.memory.recurrences.mamba1 import Mamba1, mamba1_spec
from hybridmem.memory.recurrences.mlstm import MLSTM, mlstm_spec
from hybridmem.memory.recurrences.registry import FAMILIES, Family, register_family
from hybridmem.memory.recurrences.rg_lru import RGLRU, rg_lru_spec
from hybridmem.memory.recurrences.rwkv4 import RWKV4, TokenShift, rwkv4_spec, token_shift_spec
from hybridmem.memory.recurrences.rwkv7 import RWKV7, rwkv7_spec
from hybridmem.memory.recurrences.ssd import SSD, SSDShape

__all__ = [
    "FAMILIES",
    "MLSTM",
    "RGLRU",
    "RWKV4",
    "RWKV7",
    "SSD",
    "CausalConv",
    "DeltaRule",
    "DeltaRuleShape",
    "Family",
    "Fold",
    "GatedPool",
    "LinearAttention",
    "Mamba1",
    "SSDShape",
    "ShortConv",
    "TokenShift",
    "gated_pool_spec",
    "linear_attention_spec",
    "mamba1_spec",
    "mlstm_spec",
    "register_family",
    "rg_lru_spec",
    "rwkv4_spec",
    "rwkv7_spec",
    "short_conv_spec",
    "token_shift_spec",
    "window_tensors",
]
