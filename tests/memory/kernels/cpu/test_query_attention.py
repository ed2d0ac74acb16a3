"""A query has the same bits whatever step it is in, and however many queries share what is loaded of a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridmem.memory.kernels.cpu.query_attention import attend_in_place
from hybridmem.memory.kernels.cpu.query_tiles import MANY_UNITS
from hybridmem.memory.kernels.cpu.rows import as_array
from hybridmem.memory.kernels.signature import PagedBatch, Scoring

PAGE_TOKENS = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(6, 2, 40), (2, 2, 5)])
def test_a_query_has_the_same_bits_alone_and_beside_many(
    dtype: torch.dtype, n_heads: int, n_kv_heads: int, head_dim: int
) -> None:
    n_rows, n_queries = 203, 70
    assert n_queries * n_heads // n_kv_heads > 2 * MANY_UNITS, "some tasks have many units"
    generator, n_pages = torch.Generator().manual_seed(3), -(-n_rows // PAGE_TOKENS)
    keys, values = (
        torch.randn(n_pages * n_kv_heads * PAGE_TOKENS * head_dim, generator=generator).to(dtype) for _ in range(2)
    )
    q_THD = torch.randn(n_queries, n_heads, head_dim, generator=generator).to(dtype)
    pages = np.arange(n_pages, dtype=np.int64) * n_kv_heads * PAGE_TOKENS * head_dim

    def attend(first: int, end: int) -> torch.Tensor:
        """Attend from these queries. The last query of all sees every row."""
        batch = PagedBatch(
            np.array([0, end - first]), np.array([n_rows - n_queries + end]), pages, np.array([0, n_pages]), PAGE_TOKENS
        )
        out = torch.full_like(q_THD[first:end], torch.nan)
        attend_in_place(
            q_THD[first:end], as_array(keys), as_array(values), batch, n_kv_heads, Scoring(head_dim**-0.5), out
        )
        return out

    together = attend(0, n_queries)
    assert not together.isnan().any()
    assert torch.equal(together, torch.cat([attend(i, i + 1) for i in range(n_queries)]))
    assert torch.equal(together, torch.cat([attend(0, 33), attend(33, n_queries)]))
