"""What FlashMLA accepts, as data.

Source: ``flash_mla/flash_mla_interface.py``, ``csrc/api/sparse_fwd.h`` and ``sparse_decode.h`` and
the kernels' own assertions, FlashMLA of April 2026 (9241ae3). Architectures are compute
capabilities times ten.
"""

from __future__ import annotations

DISTRIBUTION = "flash_mla"

ARCHITECTURES = (90, 100)
DIMS = (512, 64)
"""(kv_lora_rank, qk_rope_head_dim)."""
HEADS = (64, 128)
"""Head counts that have a kernel; fewer are filled up with zeros (vLLM #46189)."""
TOPK_MULTIPLE = 128
"""Lanes of a selection are filled with -1 up to a multiple of this: two tiles of SM90."""
# A request for each query token, which was a grid dimension until FlashMLA #182.
MOST_TOKENS = 65_535
# On SM90 the decode kernel for rows of 656 bytes refuses lengths; -1 alone marks an empty lane.
DECODE_LENGTHS = {90: False, 100: True}

# ``topk_length`` came with the natural LSE (082094b, January 2026); what is older returns base 2.
NATURAL_LSE_ARGUMENT = "topk_length"
