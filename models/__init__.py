"""Models on our ops: a layer of our own, and the transformers models that are enabled in place.

``transformers`` and ``compile`` need the library transformers and are imported on first use.
"""

from ._record import LayerRecord, record_decisions
from .captured import CapturedStep, CapturedVariant, RowInput
from .config import DSAConfig
from .layer import DSAAttention, MQAOnlyAttention

__all__ = [
    "CapturedStep",
    "CapturedVariant",
    "DSAAttention",
    "DSAConfig",
    "LayerRecord",
    "MQAOnlyAttention",
    "RowInput",
    "record_decisions",
]
