"""Two ranks of Lightning's DDP on the CPU: ``python -m support.lightning_ddp FOLDER``. Lightning starts the second."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from forebay.integrations.lightning import ForebayCallback
from support.lightning_runs import SMALL, fit, make, trainer

if __name__ == "__main__":
    runs = {}
    for name, callbacks in (("on", [ForebayCallback(activations=SMALL)]), ("off", [])):
        made = trainer(pl, *callbacks, strategy="ddp", devices=2, gradient_clip_val=0.5)
        runs[name] = fit(make(pl), made)
        runs[f"{name}_state"] = made.optimizers[0].state_dict()["state"]
        runs[f"{name}_stored"] = [one.offload.stats()["stored_bytes"] for one in callbacks]
        rank = made.global_rank
    torch.save(runs, Path(sys.argv[1]) / f"{rank}.pt")
