"""Multiplies rows by weights on the CPU: holds the weights of a product in one of several formats, and their kernels.

Weights have the format that `load_model(weights=...)` asks for (`models.weights.formats`):

- Floats are float32 or bfloat16. `blocked` lays them out for `blocked_kernels` (AVX2, AVX-512, and pairs of bfloat16
  with AVX512_BF16) and for `tile_kernels` (AMX). `packed` lays them out for oneDNN if compiled kernels are not the
  fastest. Weights of other dtypes and devices are left to torch.
- Integers, and floats of 8 bits, have scales. `quantised` holds them in a layout (`models.weights.layouts`):
  `integer_packing` converts what files store, `integer_rounding` rounds floats, and `row_gathering` reads single rows.
  `quantised_kernels` turns them into float32 or pairs of bfloat16, `integer_row_kernels` multiplies them as integers
  (AVX512_VNNI), and `integer_tile_kernels` multiplies them in tiles (AMX). `integer_vectors` emits what these three
  share. The last two also share `integer_few_rows`, for rows so few that they wait for memory, and `row_units`, which
  rounds rows. `joined` makes one product of weights in several layouts.

`choice` decides how a weight is held, and compiles its kernels ahead. `models.layers.linear`, `load_model` and
`hybrid-memory warmup` call it. It uses `kernels`, where each kernel has one line that says for which weights and on
which processors it is. Every kernel ends with the `epilogue`: bias, activation and rounding. For few rows, `few_rows`
computes a layer's norms, gates and sums in the same call as its products.
"""
