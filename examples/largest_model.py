"""The largest model that fits: with torch's AdamW, and with forebay's. Then a step of the larger one.

On a GPU the memory is the GPU's; without one, a GPU of 256 MB and a host of 500 MB are imagined.
"""

import os

import torch

import forebay

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
WIDTH = 4096 if on_gpu else 256
LAYER = WIDTH * WIDTH * 12  # parameters of a transformer's layer
gpu_bytes = torch.cuda.mem_get_info()[0] if on_gpu else 256_000_000
host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if on_gpu else 500_000_000

# bf16 weights and gradients on the GPU; two moments and a master in f32 wherever the optimizer keeps them.
WEIGHT, GRADIENT, STATE = 2, 2, 12
usable = int(gpu_bytes * 0.9) - 64 * 2**20  # room for activations and fragmentation, and the ring
with_torch = usable // (LAYER * (WEIGHT + GRADIENT + STATE))
with_forebay = min(usable // (LAYER * (WEIGHT + GRADIENT)), int(host_bytes * 0.8) // (LAYER * STATE))
print(f"GPU {gpu_bytes / 1e9:.2f} GB, host {host_bytes / 1e9:.2f} GB")
print(f"torch:   {with_torch} layers, {with_torch * LAYER / 1e9:.3f}e9 parameters")
print(f"forebay: {with_forebay} layers, {with_forebay * LAYER / 1e9:.3f}e9 parameters")

options = {"device": device, "dtype": torch.bfloat16}
parameters = [torch.nn.Parameter(torch.empty(12 * WIDTH, WIDTH, **options).fill_(0.01)) for _ in range(with_forebay)]
optimizer = forebay.AdamW(parameters, lr=1e-4)
for parameter in parameters:
    parameter.grad = torch.full_like(parameter, 1e-3)  # a backward pass leaves these
optimizer.step()
optimizer.synchronize()
stats = optimizer.stats()
print(f"a step took {stats['step_s']:.2f} s; {stats['pinned_bytes'] / 1e9:.2f} GB of state are on the host")
if on_gpu:
    print(f"the most GPU memory that torch used: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
