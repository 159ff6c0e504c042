"""Exact attention that never writes the N × N matrix: FlashAttention, forward and backward."""

__version__ = "2.8.3+0.1.0"

from flash_attn._ops import Availability, is_available
from flash_attn.baselines import standard_attention, tiled_attention
from flash_attn.block_mask import BlockMask
from flash_attn.dropout import dropout_mask
from flash_attn.explain import Explanation, explain
from flash_attn.from_lse import attention_probs, merge_attention
from flash_attn.interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "Availability",
    "BlockMask",
    "Explanation",
    "attention_probs",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "is_available",
    "merge_attention",
    "standard_attention",
    "tiled_attention",
]
