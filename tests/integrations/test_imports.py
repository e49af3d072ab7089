"""What importing and using forebay imports: no framework, also where all of them are installed."""

from __future__ import annotations

import importlib.util

from support.processes import python

FRAMEWORKS = ("accelerate", "lightning", "megatron", "pytorch_lightning", "torchtitan", "transformers", "trl")

CODE = """
import sys

import forebay
import forebay.integrations

for name in forebay.__all__:
    getattr(forebay, name)

import torch

model = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
optimizer = forebay.offload(torch.optim.AdamW(model.parameters()), placement="host")
with forebay.save_on_host(device="cpu"):
    model[0](torch.ones(2, 4)).sum().backward()
optimizer.step()
forebay.restore(optimizer)
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


def test_forebay_imports_no_framework() -> None:
    assert all(importlib.util.find_spec(name) for name in FRAMEWORKS)
    done = python(CODE, *FRAMEWORKS, "areal", "nemo_rl", "prime_rl", "verl", "xtuner", timeout=240)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split()
