"""Five minutes with forebay: train, save, stop, resume. Runs with and without a GPU."""

import tempfile

import torch

import forebay
from forebay import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"
width = 2048 if device == "cuda" else 256
torch.manual_seed(0)


def build():
    """Make a model and its optimizer."""
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]).to(device)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    return model, optimizer


def train(model, optimizer, steps):
    """Take steps on made-up data, and return the loss of the last one."""
    for _ in range(steps):
        inputs = torch.randn(64, width, device=device)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()  # returns when the last update is launched
        optimizer.zero_grad()
    return loss.item()


model, optimizer = build()
print(f"10 steps on {device}: loss {train(model, optimizer, 10):.4f}")
stats = optimizer.stats()
print(f"optimizer state: {stats['pinned_bytes'] / 1e6:.1f} MB on the host")

with tempfile.TemporaryDirectory() as folder:
    checkpoint.save(folder, model, optimizer, extra={"steps": 10})

    # Another process would begin here: a new model, a new optimizer, and the state of the run.
    model, optimizer = build()
    extra = checkpoint.load(folder, model, optimizer)
    print(f"resumed after {extra['steps']} steps: loss {train(model, optimizer, 10):.4f}")
