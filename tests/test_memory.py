"""Memory is linear in the sequence length, and broadcast operands are never written out.

Each measurement runs in its own process and compares peak resident sizes.
"""

from __future__ import annotations

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
        flash_attn.flash_attn_func(*small).sum()
        def run():
            out = flash_attn.flash_attn_func(q, k, v, **options)
            if grad:
                torch.autograd.grad(out, (q, k, v), dout)
        return run
    MB = 1e6
"""


def measure(script: str, timeout: float = 600) -> str:
    return run_script(MEASURE + script, timeout)


@pytest.mark.parametrize("deterministic", (False, True))
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
    """Quadruple the length twice: the peak grows by at most a linear share each time."""
    measure("""
    sizes = [peak_above(attention(n, heads=2, causal=True, dropout_p=0.1)) for n in (1024, 4096, 8192)]
    print([s / MB for s in sizes])
    # q, k, v, dout of 8192 × 2 × 64 floats are 4 MB each; one 8192 × 8192 matrix of bytes would be 67 MB
    assert sizes[2] < 60 * MB, sizes
    assert sizes[2] - sizes[1] < 3 * max(sizes[1], 8 * MB), sizes
    """)


def test_masks_and_biases_are_not_written_out():
    """Key-padding mask and key bias at length 8192 with 12 heads, also with a gradient: no (heads, N, N) anywhere."""
    measure("""
    n, heads = 8192, 4
    q, k, v = (torch.randn(1, n, heads, 16) for _ in range(3))
    mask = torch.rand(1, 1, 1, n) < 0.9
    bias = torch.randn(1, 1, 1, n)
    run = lambda: flash_attn.flash_attn_func(q, k, v, mask=mask, bias=bias)
    run()
    used = peak_above(run)
    print(used / MB)
    assert used < 30 * MB, used  # S of one head as bytes: 67 MB

    n, heads = 2048, 12
    q, k, v = (torch.randn(1, n, heads, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, n, n, requires_grad=True)  # 17 MB; times 12 heads 200 MB
    mask = torch.rand(1, 1, n, n) < 0.9
    def both():
        out = flash_attn.flash_attn_func(q, k, v, mask=mask, bias=bias)
        torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))
    both()
    used = peak_above(both)
    print(used / MB)
    assert used < 100 * MB, used
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
    """200 calls of forward and backward: the resident size stays."""
    measure("""
    run = attention(512, heads=2, dropout_p=0.1, causal=True)
    for _ in range(20): run()
    gc.collect(); before = now("VmRSS")
    for _ in range(200): run()
    gc.collect(); grown = now("VmRSS") - before
    print(grown / MB)
    assert grown < 5 * MB, grown
    """)
