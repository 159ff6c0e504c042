"""`python -m flash_attn.paper`: the argument of the FlashAttention paper, run again. Needs `pip install
'flash-attn[paper]'`; nothing of it is imported by flash_attn itself."""
