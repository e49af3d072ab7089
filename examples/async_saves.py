"""Saves beside training: each save has the state of the moment of its call, and training goes on."""

import tempfile
import time

import torch

import forebay
from forebay import checkpoint

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
width, layers = (8192, 16) if on_gpu else (512, 8)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(device)
optimizer = forebay.AdamW(model.parameters(), lr=1e-4)


def step():
    """Take a step, and return how long it took."""
    begun = time.perf_counter()
    inputs = torch.randn(16, width, device=device)
    (model(inputs) - inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


usual = min(step() for _ in range(3))
with tempfile.TemporaryDirectory() as folder:
    begun = time.perf_counter()
    save = checkpoint.async_save(folder, model, optimizer, extra={"step": 3}, keep_last=2)
    print(f"the call took {1e3 * (time.perf_counter() - begun):.0f} ms")
    beside = 0
    while not save.done():
        slow = step()
        beside += 1
    save.result()  # raises the error if the save failed
    print(f"the save took {save.seconds():.2f} s; {beside} steps ran beside it")
    print(f"a step takes {1e3 * usual:.0f} ms, the last one beside the save {1e3 * slow if beside else 0:.0f} ms")
    print("saved:", checkpoint.load(folder, model, optimizer), "although", 3 + beside, "steps were taken")
checkpoint.release()  # frees the memory of the copies; otherwise it is kept for the next save
