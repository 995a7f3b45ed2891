"""What FlashInfer 0.6.18 to 0.7.x accepts, as data.

Sources: the Python and CUDA sources of the wheels 0.6.18.post1, 0.7.2.post1 and 0.7.4, and the
issues named beside a limit. Architectures are compute capabilities times ten.
"""

from __future__ import annotations

import torch

DISTRIBUTION = "flashinfer-python"
FIRST_VERSION = (0, 6, 18)
BELOW_VERSION = (0, 8)

# Most query tokens of one trtllm-gen call: a grid dimension. Beyond it no kernel starts, the output
# stays as it was, and nothing is raised (FlashInfer #3125, still so in 0.7.4).
MOST_TOKENS = 65_535

# Workspace of one wrapper or call: what FlashInfer's own documentation asks for.
WORKSPACE_BYTES = 128 << 20
# trtllm-gen keeps 8 bytes a head and query token for an LSE, with the query tokens of a request
# rounded up to 256, and a guard behind them (``trtllm_fmha_kernel_launcher.cu``).
LSE_SLOT_BYTES = 8
LSE_QUERY_TILE = 256
LSE_GUARD_BYTES = 1 << 20

SPARSE_BACKENDS = {90: "fa3", 100: "trtllm-gen", 120: "sparse"}
"""What sparse MLA runs on, by architecture."""

SPARSE_DTYPES = {
    90: (torch.bfloat16, torch.float16),
    100: (torch.bfloat16,),
    120: (torch.bfloat16,),
}
"""Query dtypes of sparse MLA. The keys have the same, except for the packed bytes of SM120."""

SPARSE_LAYOUTS = {90: "bf16", 100: "bf16", 120: "fp8_ds_mla"}
"""Cache layouts that sparse MLA reads. trtllm-gen also reads per-tensor fp8, for fp8 queries alone:
rounding them here would not be the function that was asked for."""

SPARSE_DIMS = {90: ((512, 64),), 100: ((512, 64), (256, 64)), 120: ((512, 64),)}
"""(kv_lora_rank, qk_rope_head_dim) of sparse MLA."""

NOPE_DIMS = {512: 128, 256: 64}
"""qk_nope_head_dim of the models with these kv_lora_ranks; an argument that no kernel reads."""

SPARSE_ROUNDS = {120: torch.float8_e4m3fn}
"""What a kernel rounds queries and probabilities to before it multiplies: on SM120, results are
those of fp8 operands, beyond what a kernel for bfloat16 may err by (``ComputeMode::FP8``)."""

SPARSE_TOPK_MULTIPLE = {90: 1, 100: 128, 120: 64}
"""Lanes of a selection are filled with -1 up to a multiple of this."""

MOST_HEADS = 128
# trtllm-gen has no tile for the head counts between these.
SM100_GAP = (64, 128)
SM100_PAGES = (64, 32)
"""Page sizes of trtllm-gen, the larger one first: packed keys are read in pages of it."""

# Calls of at most so many tokens go to decode kernels, which in 0.7 take any head count and top-k.
SM120_DECODE_TOKENS = 64
# Prefill kernels know these head counts, and before 0.7 decode kernels too (FlashInfer #4336,
# #5135). Other counts are computed in calls of 64 tokens.
SM120_HEADS = (8, 16, 32, 64, 128)
SM120_OLD_TOPKS = (128, 512, 1024, 2048)
SM120_OLD_PREFILL_TOPK = 2048
SM120_OLD_PAGE = 64
# The layout fp8_ds_mla allows any scale, and "pow2_fp32" would drop the mantissa of one.
SM120_SCALES = "arbitrary_fp32"
SM120_WRAPPER_VERSION = (0, 7)

MLA_METADATA_VERSION = (0, 7)
"""From here on the MLA wrapper takes its metadata in one object, and warns about the old form."""

RAGGED_BACKENDS = {80: "fa2", 89: "fa2", 90: "fa3", 100: "trtllm-gen", 120: "fa2"}
"""What dense prefill runs on. "auto" may take a slow one (FlashInfer #3400)."""

RAGGED_DTYPES = (torch.bfloat16, torch.float16)

RAGGED_DIMS = {
    80: ((64, 64), (128, 128), (192, 128), (256, 256)),
    89: ((64, 64), (128, 128), (192, 128), (256, 256)),
    90: ((64, 64), (128, 128), (192, 128), (256, 256)),
    100: ((192, 128), (128, 128), (256, 256)),
    120: ((64, 64), (128, 128), (192, 128), (256, 256)),
}
"""(head dim of queries and keys, of values) of dense prefill."""

# Ties can be broken by position in two kernels alone. FilteredTopK needs 128 KiB of shared memory,
# which sm_89 and sm_120 do not have, and takes at most 2048; what 0.7 takes from CUB needs sm_90
# (FlashInfer #5058), and is only sure to be taken where a call must be safe for CUDA graphs.
TOPK_NATIVE = (80, 90, 100)
TOPK_CUB = {120: (0, 7)}
"""Architectures of each, and the first version."""
MOST_TOPK = 2048
MOST_CUB_COLUMNS = 1 << 21
# ``TopKTieBreak.SMALL``: of equal scores at the threshold, those at the lowest positions.
TIE_BREAK_SMALL = 1

MERGE_ARCHITECTURES = (80, 89, 90, 100, 120)
MERGE_DTYPES = (torch.bfloat16, torch.float16)
MERGE_HEAD_DIMS = (64, 128, 256, 512)
# One block holds all heads: head_dim / vec_size threads of at most 1024 for each.
MERGE_THREADS = 1024
