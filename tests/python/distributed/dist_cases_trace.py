"""Cases in which every rank traces its part of a run, and the files are merged."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import forebay
from support.dist.models import adamw, make, shard, train
from support.dist.registry import case, shared_folder
from support.trace import check_events, check_header, read


@case(2)
def traces_of_all_ranks_are_merged_on_one_clock() -> None:
    folder, rank = shared_folder(), dist.get_rank()
    net = shard(make())
    optimizer = adamw(net)
    train(net, optimizer, range(1))
    alone = torch.nn.Linear(2, 2)
    path = folder / "merged-run.json"
    if rank == 1:
        # Its trace begins when rank 0 has made its first pass in one.
        dist.barrier()
    with forebay.trace(path) as trace:
        alone(torch.ones(2))
        if rank == 0:
            dist.barrier()
        train(net, optimizer, range(1, 3))
    assert trace.path.name == ("merged-run.json", "merged-run.rank1.json")[rank]
    own = read(trace.path)
    assert (own.header["rank"], own.header["ranks"]) == (rank, 2)
    assert own.sum("fetch") == own.sum("store") > 0
    dist.barrier()
    paths = [str(folder / name) for name in ("merged-run.rank1.json", "merged-run.json")]
    if rank == 0:
        output = folder / "merged-all.json"
        command = ["forebay", "trace", "merge", *paths, "-o", str(output)]
        assert forebay._core.command(command, "a test") == 0
        merged = json.loads(output.read_text())
        headers = merged["forebay"]["ranks"]
        for header in headers:
            check_header(header)
        assert (merged["forebay"]["schema"], merged["forebay"]["merged"]) == (1, True)
        assert [header["rank"] for header in headers] == [0, 1]
        first = min(header["zero_unix_ns"] for header in headers)
        end = max((header["zero_unix_ns"] - first) / 1e3 + header["seconds"] * 1e6 for header in headers)
        check_events(merged["traceEvents"], {0, 1}, end)
        assert headers[0]["zero_unix_ns"] < headers[1]["zero_unix_ns"]
        passes: list[list[dict[str, float]]] = [
            [event for event in merged["traceEvents"] if event["pid"] == one and event.get("cat") == "pass"]
            for one in (0, 1)
        ]
        # The first of rank 0 was over before the trace of rank 1 began; then each step needs both.
        assert passes[0][0]["ts"] + passes[0][0]["dur"] <= passes[1][0]["ts"]
        assert passes[1][0]["ts"] <= passes[0][-1]["ts"] + passes[0][-1]["dur"]
    dist.barrier()
