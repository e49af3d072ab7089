"""FSDP2 on two processes, killed in the middle of a run, resumed on one.

``python examples/fsdp_resume.py`` starts everything itself: two GPUs if there are two, else the CPU.
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import forebay
from forebay import checkpoint

STEPS = 8


def work(folder: str, die_at: int) -> None:
    """Run one process: resume if there is a checkpoint, train, save every second step."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= world
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = dist.init_device_mesh("cuda" if on_gpu else "cpu", (world,))
    width, layers = (4096, 16) if on_gpu else (64, 4)

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    model = model.cuda() if on_gpu else model
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    first = 0
    if checkpoint.exists(folder):
        first = checkpoint.load(folder, model, optimizer)["step"]
        if rank == 0:
            print(f"resumed after step {first} on {world} process{'es' if world > 1 else ''}", flush=True)
    for step in range(first, STEPS):
        # The whole batch is the same for any number of processes; each takes its rows.
        rows = torch.randn(8, width, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        rows = rows.cuda() if on_gpu else rows
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} on {world}: loss {loss.item():.4f}", flush=True)
        if step + 1 == die_at:
            os._exit(1)  # as a machine that is switched off
        if step % 2 == 1:
            checkpoint.save(folder, model, optimizer, extra={"step": step + 1}, keep_last=2)
    dist.destroy_process_group()


def launch(world: int, folder: str, die_at: int) -> int:
    """Start the processes, and return the exit code."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return subprocess.run([*run, __file__, folder, str(die_at)], stderr=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print("exit code of the first run:", launch(2, folder, die_at=5), flush=True)
            sys.exit(launch(1, folder, die_at=0))
