"""A trainer, run as a module under torchrun."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from prime_rl.trainer.optim import setup_optimizer

if __name__ == "__main__":
    model = torch.nn.Linear(3, 3)
    config = SimpleNamespace(type="adamw", lr=1e-3, weight_decay=0.1, betas1=0.9, betas2=0.99)
    optimizer, _ = setup_optimizer(config, list(model.named_parameters()), None, cpu_offload=True)
    print(type(optimizer).__module__, *sys.argv[1:])
