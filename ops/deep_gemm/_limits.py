"""What DeepGEMM's ``fp8_mqa_logits`` accepts, as data.

Source: ``csrc/apis/attention.hpp`` and the README, DeepGEMM of June 2026 (54e2261). Architectures
are compute capabilities times ten.
"""

from __future__ import annotations

DISTRIBUTION = "deep_gemm"

HEADS = {90: (32, 64), 100: (8, 16, 32, 64)}
"""Index heads that have a kernel, by architecture; SM120 is not maintained (DeepGEMM #317)."""
HEAD_DIMS = (32, 64, 128)
# A row of logits is allocated in whole blocks of 256 keys, its stride in multiples of 1024 bytes.
ROW_ELEMENTS = 256
