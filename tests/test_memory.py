"""Memory is linear in the sequence length, and broadcast operands are never written out.

Each measurement runs in its own process and compares peak resident sizes.
"""

from __future__ import annotations

import os

import pytest
from test_threads import run_script

MEASURE = """
    import gc, threading, torch, flash_attn
    torch.set_num_threads(2)

    def now(field):
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith(field)) * 1024

    def peak_above(function):
        '''Bytes that the resident size rises while `function` runs.'''
        function_result = None
        gc.collect()
        try:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # the peak starts anew
            before = now("VmRSS")
            function()
            return now("VmHWM") - before
        except PermissionError:
            peak, stop, before = [0], threading.Event(), now("VmRSS")
            def watch():
                while not stop.wait(0.001):
                    peak[0] = max(peak[0], now("VmRSS"))
            watcher = threading.Thread(target=watch); watcher.start()
            function()
            stop.set(); watcher.join()
            return max(peak[0], now("VmRSS")) - before

    def attention(n, heads=1, d=64, grad=True, **options):
        '''A warmed-up closure: forward and backward at length n.'''
        q, k, v = (torch.randn(1, n, heads, d, requires_grad=grad) for _ in range(3))
        dout = torch.randn(1, n, heads, d)
        small = [t[:, :9].detach().requires_grad_(grad) for t in (q, k, v)]
        out = flash_attn.flash_attn_func(*small)
        if grad:  # torch imports much on its first backward
            torch.autograd.grad(out, small, torch.ones_like(out))
        def run():
            out = flash_attn.flash_attn_func(q, k, v, **options)
            if grad:
                torch.autograd.grad(out, (q, k, v), dout)
        return run
    MB = 1e6
"""


def measure(script: str, timeout: float = 600) -> str:
    """Runs `script` with the helpers above."""
    if os.environ.get("FLASH_ATTN_SANITIZED"):
        pytest.skip("the sanitizers' own memory would be measured")
    return run_script(MEASURE + script, timeout)


@pytest.mark.parametrize("deterministic", (False, pytest.param(True, marks=pytest.mark.full)))
def test_16k(deterministic):
    """Length 16k, 1 head, d 64, fp32, forward and backward: less than 125 MB above the inputs (S alone: 1 GB)."""
    measure(f"""
    used = peak_above(attention(16384, deterministic={deterministic}))
    print(used / MB)
    assert used < 125 * MB, used
    """)


@pytest.mark.full
def test_64k():
    """Length 64k, 1 head, d 64, forward and backward: less than 500 MB above the inputs."""
    measure("""
    used = peak_above(attention(65536))
    print(used / MB)
    assert used < 500 * MB, used
    """, timeout=3600)  # fmt: skip


def test_growth_is_linear():
    """Quadruple the length: the peak grows fourfold at most, with every option that could keep a matrix."""
    measure("""
    options = dict(causal=True, dropout_p=0.1, softcap=5.0, alibi_slopes=torch.tensor([0.1, 0.2]))
    sizes = [peak_above(attention(n, heads=2, **options)) for n in (1024, 4096)]
    print([s / MB for s in sizes])
    # q, k, v, dout are 2 MB each at 4096; one (2, 4096, 4096) matrix of bytes would be 34 MB
    assert sizes[1] < 25 * MB, sizes
    """)


def test_masks_and_biases_are_not_written_out():
    """Masks and biases broadcast over heads and rows, forward and backward: no (heads, N, N) anywhere."""
    measure("""
    n, heads = 32768, 8
    q, k, v = torch.randn(1, 256, heads, 8), torch.randn(1, n, heads, 8), torch.randn(1, n, heads, 8)
    mask, bias = torch.rand(1, 1, 1, n) < 0.9, torch.randn(1, 1, 1, n)
    run = lambda: flash_attn.flash_attn_func(q, k, v, mask=mask, bias=bias)
    run()
    used = peak_above(run)
    print(used / MB)
    assert used < 30 * MB, used  # one mask of bytes: 67 MB

    n, heads = 1024, 24
    q, k, v = (torch.randn(1, n, heads, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, n, n, requires_grad=True)  # 4 MB; times 24 heads 100 MB
    mask = torch.rand(1, 1, n, n) < 0.9
    def both():
        out = flash_attn.flash_attn_func(q, k, v, mask=mask, bias=bias)
        torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))
    both()
    used = peak_above(both)
    print(used / MB)
    assert used < 50 * MB, used
    """)


def test_expanded_keys_are_not_written_out():
    """K and V of one head expanded over 64: the forward copies neither."""
    measure("""
    n = 8192
    q = torch.randn(1, 16, 64, 64)
    k, v = (torch.randn(1, n, 1, 64).expand(1, n, 64, 64) for _ in range(2))
    run = lambda: flash_attn.flash_attn_func(q, k, v)
    run()
    used = peak_above(run)
    print(used / MB)
    assert used < 40 * MB, used  # one copy of K: 134 MB
    """)


def test_memory_does_not_leak():
    """500 calls of forward and backward: the resident size stays."""
    measure("""
    run = attention(129, heads=2, dropout_p=0.1, causal=True)
    for _ in range(50): run()
    gc.collect(); before = now("VmRSS")
    for _ in range(500): run()
    gc.collect(); grown = now("VmRSS") - before
    print(grown / MB)
    assert grown < 5 * MB, grown
    """)
