"""Reinforcement learning on one GPU: trainer and generator take turns, and the one that waits sleeps on the host."""

import torch

import forebay

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
width, layers = (4096, 24) if on_gpu else (64, 4)
torch.manual_seed(0)


def network():
    """Make a model; the trainer and the generator have the same shapes."""
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(device)


def gpu_gb():
    """Return the GPU memory that torch has from the driver."""
    return torch.cuda.memory_reserved() / 1e9 if on_gpu else 0.0


trainer, generator = network(), network()
optimizer = forebay.AdamW(trainer.parameters(), lr=1e-4, max_grad_norm=1.0)
# prepare=True pins the host memory in the background, before the first sleep needs it.
trainer_sleeper = forebay.Sleeper(trainer, optimizer, prepare=True)
generator_sleeper = forebay.Sleeper(generator, prepare=True)
generator_sleeper.sleep()

for turn in range(3):
    # The trainer's turn: learn from what was generated.
    samples = torch.randn(16, width, device=device)
    loss = (trainer(samples) - samples).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    # The generator's turn, with the trainer's new weights. Both are awake for this copy only.
    generator_sleeper.wake()
    with torch.no_grad():
        for mine, new in zip(generator.parameters(), trainer.parameters(), strict=True):
            mine.copy_(new)
    trainer_sleeper.sleep()
    with torch.no_grad():
        generated = generator(torch.randn(4, width, device=device))
    print(f"turn {turn + 1}: loss {loss.item():.4f}, {gpu_gb():.2f} GB of the GPU while generating")
    generator_sleeper.sleep()
    trainer_sleeper.wake(lazy=True)  # the first layer runs before the last has arrived

stats = trainer_sleeper.stats()
print(f"the trainer sleeps {stats['bytes'] / 1e6:.1f} MB at {stats['sleep_gbps']:.1f} GB/s")
try:
    generator(torch.randn(1, width, device=device))
except forebay.AsleepError as error:
    print("using a model that sleeps:", str(error).split(";")[0])
