"""The attentions that are compared: ours, standard, and approximate ones from PyPI packages.

Each is built for a `Setting` and gives a `Contender`: inputs and a function of them. The peers' packages are imported
only when they are asked for; `unavailable` says why one cannot run. Approximate attentions are compressed as in the
paper (Appendix E): to an eighth of the sequence or 256, whichever is smaller.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn.block_mask import BlockMask
from flash_attn.interface import flash_attn_func

BLOCK = 128  # rows and keys of a block of block-sparse attention
LOCAL_WINDOW = 64
STANDARD_MATRICES = 8  # of seqlen × seqlen, more than standard attention holds at a time


@dataclass(frozen=True)
class Setting:
    """What is attended to: q, k, v of batch × heads sequences.

    padding: keys beyond a length are hidden, drawn for each sequence between seqlen - 20 and seqlen, as in the paper.
    """

    batch: int
    heads: int
    seqlen: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    dropout_p: float = 0.0
    padding: bool = False

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def rows_first(self) -> list[Tensor]:
        """q, k, v as ours takes them: (batch, seqlen, heads, dim)."""
        return [self.randn(self.batch, self.seqlen, self.heads, self.dim) for _ in "qkv"]

    def heads_first(self) -> list[Tensor]:
        """The same as (batch, heads, seqlen, dim), which suits matrix products."""
        return [self.randn(self.batch, self.heads, self.seqlen, self.dim) for _ in "qkv"]

    def lengths(self) -> Tensor | None:
        """int32 (batch,): the real keys of each sequence."""
        if not self.padding:
            return None
        least = max(1, self.seqlen - 20)
        return torch.randint(least, self.seqlen + 1, (self.batch,), dtype=torch.int32, device=self.device)

    def real_keys(self) -> Tensor | None:
        """bool (batch, seqlen)."""
        lengths = self.lengths()
        return None if lengths is None else torch.arange(self.seqlen, device=self.device) < lengths[:, None]

    @property
    def compressed(self) -> int:
        return max(1, min(self.seqlen // 8, 256))


@dataclass(frozen=True)
class Contender:
    """inputs: what gets gradients, q, k and v first. attend(*inputs): the output."""

    inputs: Sequence[Tensor]
    attend: Callable[..., Tensor]

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attend(*self.inputs)

    def both(self) -> Callable[[], object]:
        """A call that runs forward and backward."""
        dout = torch.randn_like(self.forward())
        return lambda: torch.autograd.grad(self.attend(*self.inputs), self.inputs, dout)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """Attention as one would write it in PyTorch, with nothing to spare: the paper's Algorithm 0 in q's dtype.

    Args: q, k, v (batch, heads, seqlen, dim); mask None or additive, broadcastable to (batch, heads, seqlen, seqlen).
    What its kernels move on a GPU is what `io_model.standard_in_pytorch` counts. q is scaled, not S, which would be a
    pass over a seqlen × seqlen matrix in forward and another in backward.
    """
    p = (q * q.shape[-1] ** -0.5) @ k.mT
    p = p if mask is None else p + mask
    return F.dropout(p.softmax(-1), dropout_p, dropout_p > 0) @ v


def standard(s: Setting) -> Contender:
    real = s.real_keys()
    mask = None
    if real is not None:
        mask = torch.zeros(real.shape, dtype=s.dtype, device=s.device).masked_fill(~real, -math.inf)[:, None, None]
    return Contender(s.heads_first(), lambda q, k, v: plain_attention(q, k, v, mask, s.dropout_p))


def torch_fused(s: Setting) -> Contender:
    real = s.real_keys()
    mask = None if real is None else real[:, None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, s.dropout_p)

    return Contender(s.heads_first(), attend)


def flash(s: Setting) -> Contender:
    lengths = s.lengths()
    return Contender(s.rows_first(), lambda q, k, v: flash_attn_func(q, k, v, s.dropout_p, seqused_k=lengths))


def block_sparse(s: Setting) -> Contender:
    """Ours with the paper's fixed pattern, a butterfly of blocks."""
    mask = BlockMask.butterfly(s.seqlen, s.seqlen, (BLOCK, BLOCK), device=s.device)
    return _block_sparse(s, mask)


def random_blocks(s: Setting, density: float) -> Contender:
    """Ours with blocks of which a share is kept at random, in every row of blocks as many as in the others."""
    blocks = math.ceil(s.seqlen / BLOCK)
    order = torch.rand(blocks, blocks, device=s.device).argsort(-1)
    kept = order < kept_blocks(s, density)[0]
    return _block_sparse(s, BlockMask(kept, s.seqlen, s.seqlen, (BLOCK, BLOCK)))


def kept_blocks(s: Setting, density: float) -> tuple[int, float]:
    """How many blocks of a row `random_blocks` keeps, one at least, and what share of them that is."""
    blocks = math.ceil(s.seqlen / BLOCK)
    kept = max(1, round(density * blocks))
    return kept, kept / blocks


def _block_sparse(s: Setting, mask: BlockMask) -> Contender:
    lengths = s.lengths()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, s.dropout_p, seqused_k=lengths, block_mask=mask)

    return Contender(s.rows_first(), attend)


def local(s: Setting) -> Contender:
    """Beltagy et al., Longformer, 2020, as in the package local-attention: a window of 64 and its two neighbours."""
    from local_attention import LocalAttention

    window = min(LOCAL_WINDOW, s.seqlen)
    module = LocalAttention(window, dropout=s.dropout_p, use_rotary_pos_emb=False, autopad=True).to(s.device)
    real = s.real_keys()
    return Contender(s.heads_first(), lambda q, k, v: module(q, k, v, mask=real))


def linformer(s: Setting) -> Contender:
    """Wang et al., Linformer, 2020, as in the package linformer: K and V projected along the sequence.

    Its projections of the hidden state are taken out: what remains takes q for k and v, too. It knows no padding.
    """
    from linformer import LinformerSelfAttention

    width = s.heads * s.dim
    module = LinformerSelfAttention(width, s.seqlen, k=s.compressed, heads=s.heads, dropout=s.dropout_p)
    for projection in ("to_q", "to_k", "to_v", "to_out"):
        setattr(module, projection, torch.nn.Identity())
    module.to(s.device, s.dtype)
    x = s.randn(s.batch, s.seqlen, width)
    # Both projections along the sequence have gradients of their own.
    return Contender([x, *module.parameters()], lambda x, *_: module(x))


def performer(s: Setting) -> Contender:
    """Choromanski et al., Performer, 2020, as in the package performer-pytorch: FAVOR+ with d ln d features.

    Without dropout and padding, which it does not have; in bf16 where fp16 is asked for, in which it overflows.
    """
    from performer_pytorch import FastAttention

    s = replace(s, dtype=torch.bfloat16) if s.dtype == torch.float16 else s
    module = FastAttention(s.dim).to(s.device, s.dtype)
    return Contender(s.heads_first(), module)


def reformer(s: Setting) -> Contender:
    """Kitaev et al., Reformer, 2020, as in the package reformer-pytorch: buckets of 64 by locality-sensitive hashing,
    one round. Queries are the keys."""
    from reformer_pytorch import LSHAttention

    bucket = max(1, min(64, s.seqlen // 2))
    module = LSHAttention(dropout=s.dropout_p, bucket_size=bucket, n_hashes=1).to(s.device)
    module.eval() if s.dropout_p == 0 else module.train()
    real = s.real_keys()
    mask = None if real is None else real.repeat_interleave(s.heads, 0)
    qk, v = (s.randn(s.batch * s.heads, s.seqlen, s.dim) for _ in range(2))

    def attend(qk: Tensor, v: Tensor) -> Tensor:
        module._cache.clear()  # of buckets, for reversible networks
        return module(qk, v, input_mask=mask)[0]

    return Contender([qk, v], attend)


CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "standard": standard,
    "flash": flash,
    "block-sparse": block_sparse,
    "local": local,
    "linformer": linformer,
    "performer": performer,
    "reformer": reformer,
    "torch": torch_fused,
}
NEEDS = {  # module → package
    "local": ("local_attention", "local-attention"),
    "linformer": ("linformer", "linformer"),
    "performer": ("performer_pytorch", "performer-pytorch"),
    "reformer": ("reformer_pytorch", "reformer-pytorch"),
}
# What the peers cannot be asked for.
NO_DROPOUT = {"performer"}
NO_PADDING = {"linformer", "performer"}


def does_not_fit(name: str, s: Setting) -> bool:
    """Whether the matrices of standard attention would take more than half of the CPU's free memory."""
    if name != "standard" or s.device.type != "cpu":
        return False
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return STANDARD_MATRICES * s.batch * s.heads * s.seqlen**2 * s.dtype.itemsize > free / 2


def unavailable(name: str) -> str:
    """Why a contender cannot run here; empty: it can."""
    if name not in NEEDS:
        return ""
    module, package = NEEDS[name]
    if importlib.util.find_spec(module) is None:
        return f"the package {package} is not installed (pip install 'flash-attn[paper]')"
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever an old package stumbles over in a newer Python or torch
        return (
            f"the package {package} cannot be imported on Python {sys.version_info[0]}.{sys.version_info[1]}: {error}"
        )
    return ""
