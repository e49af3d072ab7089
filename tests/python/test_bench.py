"""The benchmark and the demonstration, small, on the CPU."""

import copy
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import forebay
from support.processes import environment

REPOSITORY = Path(__file__).parents[2]
STREAMED = ["forebay", "forebay-72mib", "forebay-bf16", "forebay-compact", "forebay-small"]


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(REPOSITORY / script), *map(str, arguments)]
    # Several threads for small tensors cost more than they bring where other tests use the machine too.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict]:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    options = ["--quick", "--device", "cpu", "--steps", "2", "--wire-gbps", "5", "--commit", "abc", "--json", path]
    done = run("bench/step.py", *options)
    assert done.returncode == 0, done.stderr
    return done, json.loads(path.read_text())


def test_the_file_says_where_the_numbers_come_from(bench) -> None:
    _, found = bench
    assert found["commit"] == "abc"
    assert found["command"].startswith("python bench/step.py --quick")
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"].keys() >= {"gpu", "driver", "cpus", "memory_bytes", "python", "forebay"}


def test_every_row_has_numbers_or_a_reason(bench) -> None:
    _, found = bench
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows)[:4] == ["torch-fused", "torch-foreach", "load-all", "torchao"]
    assert "cannot_run" in rows.pop("torchao")
    for row in rows.values():
        assert len(row["step_s"]) == 2
        assert 0 < row["median_call_s"] <= row["median_step_s"] * 1.01
        assert row["gparam_per_s"] == pytest.approx(row["params"] / row["median_step_s"] / 1e9)


@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_row_is_set_against_the_wire(bench, name: str) -> None:
    row = next(row for row in bench[1]["rows"] if row["name"] == name)
    each_way = {"forebay-bf16": 12, "forebay-compact": 10.125}.get(name, 8)
    assert row["payload_bytes"] == each_way * row["params"] == row["last_step"]["fetch_bytes"]
    assert row["floor_step_s"] == pytest.approx(row["payload_bytes"] / 5e9)
    assert row["percent_of_wire"] == pytest.approx(100 * row["floor_step_s"] / row["median_step_s"])
    assert row["ring_bytes"] == (72 << 20 if name == "forebay-72mib" else 64 << 20)
    assert row["pinned_bytes"] >= row["payload_bytes"]
    assert 0 < row["median_host_s"] <= row["median_call_s"]


@pytest.mark.parametrize(("name", "bytes_each"), [("forebay-bf16-state", 6.125), ("forebay-8bit", 4.156)])
def test_reduced_state_moves_fewer_bytes(bench, name: str, bytes_each: float) -> None:
    row = next(row for row in bench[1]["rows"] if row["name"] == name)
    assert row["payload_bytes"] == row["last_step"]["fetch_bytes"]
    # Tensors of less than a block keep f32.
    assert row["payload_bytes"] / row["params"] == pytest.approx(bytes_each, rel=0.01)
    assert row["floor_step_s"] == pytest.approx(row["payload_bytes"] / 5e9)


def test_exactness_is_part_of_it(bench) -> None:
    exactness = bench[1]["exactness"]
    assert exactness["exact"] is True
    assert exactness["steps"] == 20
    assert {check["what"]: check["differing"] for check in exactness["checks"]}[
        "forebay streamed, forebay resident"
    ] == 0


def test_the_table_names_every_row_and_a_pipe_sees_no_progress(bench) -> None:
    done, found = bench
    assert all(row["label"] in done.stdout for row in found["rows"])
    assert all(peer["label"] in done.stdout and peer["reason"] for peer in found["did_not_run"])
    assert done.stderr == ""


def test_unknown_rows_are_refused() -> None:
    done = run("bench/step.py", "--rows", "forebay,fastest")
    assert done.returncode == 2
    assert "fastest" in done.stderr


def test_the_plot_has_a_bar_for_every_row(bench, tmp_path: Path) -> None:
    found = copy.deepcopy(bench[1])
    rows = [row for row in found["rows"] if "step_s" in row]
    for row in rows:
        row["torch_peak_bytes"], row["driver_peak_bytes"] = 64 << 20, 110 << 20
    source, picture = tmp_path / "found.json", tmp_path / "found.svg"
    source.write_text(json.dumps(found))
    done = run("bench/plot.py", source, picture)
    assert done.returncode == 0, done.stderr
    text = "".join(ET.parse(picture).getroot().itertext())
    assert all(row["label"] in text for row in rows)
    assert "http" not in picture.read_text().replace("http://www.w3.org/2000/svg", "")


def test_a_plot_without_a_gpu_is_refused(bench, tmp_path: Path) -> None:
    source = tmp_path / "found.json"
    source.write_text(json.dumps(bench[1]))
    done = run("bench/plot.py", source, tmp_path / "found.svg")
    assert done.returncode == 1
    assert "no row has GPU memory" in done.stderr


def test_the_demo_trains_and_compares(tmp_path: Path) -> None:
    done = run("scripts/demo.py", "--device", "cpu", "--steps", "3", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads((tmp_path / "demo.json").read_text())
    _, streamed, resident = found["runs"]
    assert found["holds"] is True
    assert streamed["against_resident"]["differing"] == 0
    assert streamed["losses"] == resident["losses"]
    # The ring is far smaller than the state, and a step goes around it many times.
    assert streamed["state_device_bytes"] * 10 < streamed["state_bytes"] <= streamed["pinned_bytes"]
    assert streamed["ring_rounds"] >= 10
    assert streamed["against_torch"]["largest_difference"] < 1e-3
    assert len((tmp_path / "demo_losses.csv").read_text().splitlines()) == 4
    assert "yes, bit for bit" in done.stdout
    assert str(tmp_path / "demo.json") in done.stdout
    assert str(tmp_path / "demo_report.html") in done.stdout
    assert "<title>forebay report: demo_trace.json</title>" in (tmp_path / "demo_report.html").read_text()
    assert json.loads((tmp_path / "demo_trace.json").read_text())["forebay"]["schema"] == 1


def test_the_update_on_the_host_against_torchs(tmp_path: Path) -> None:
    path = tmp_path / "cpu_adam.json"
    options = ["--quick", "--device", "cpu", "--repetitions", "2", "--commit", "abc", "--json", path]
    done = run("bench/cpu_adam.py", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [case["dtype"] for case in found["kernel"]] == ["f32", "bf16"]
    for case in found["kernel"]:
        assert len(case["times_s"]["forebay"]) == len(case["times_s"][case["peer"]]) == 2
        assert case["ratio"] > 0
        assert case["touch_gbps"] > 0
    assert found["simulated"]["differing"] == 0
    assert {row["placement"] for row in found["simulated"]["rows"]} == {"stream", "host", "hybrid"}
    assert "hybrid" in done.stdout


def test_results_of_a_gpu_can_be_printed_again() -> None:
    stored = json.loads((REPOSITORY / "bench/results/h200_cpu_adam.json").read_text())
    command = "import json, sys, cpu_adam; cpu_adam.print_report(json.load(sys.stdin))"
    done = subprocess.run(
        [sys.executable, "-c", command],
        check=True,
        capture_output=True,
        text=True,
        input=json.dumps(stored),
        env=environment(PYTHONPATH=os.pathsep.join([str(REPOSITORY / "bench"), *filter(None, sys.path)])),
    )
    assert "host, bf16" in done.stdout
    placed = [row for row in stored["rows"] if row["last_step"]]
    assert len(re.findall(r"wire \d+ %, memory \d+ %", done.stdout)) == len(placed) > 0


def test_activation_offload_is_measured_and_exact(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "activations.json"
    options = [
        "--quick",
        "--device",
        "cpu",
        "--steps",
        "1",
        "--rows",
        "nothing,checkpoint,forebay-full,forebay-recompute,forebay-6",
    ]
    command = [
        sys.executable,
        str(REPOSITORY / "bench/activations.py"),
        *options,
        "--commit",
        "abc",
        "--json",
        str(path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    assert found["exactness"] == {
        "differing": {"nothing": 0, "forebay-full": 0, "forebay-recompute": 0, "forebay-6": 0},
        "exact": True,
    }
    rows = {row["name"]: row for row in found["rows"]}
    full, recomputed = (rows[f"forebay-{name}"]["moved_per_step"] for name in ("full", "recompute"))
    assert full["stored_bytes"] > recomputed["stored_bytes"] > 0
    assert full["fetched_bytes"] > 0
    assert "gradients of forebay-full: equal, bit for bit" in done.stdout
    assert rows["forebay-6"]["table"][-1]["predicted_pass_s"] > 0
    assert rows["forebay-6"]["times_checkpoint"] > 0


def test_activations_are_drawn_as_points(tmp_path: Path) -> None:
    found = json.loads((REPOSITORY / "bench/results/h200_budgets.json").read_text())
    source, picture = tmp_path / "found.json", tmp_path / "found.svg"
    source.write_text(json.dumps(found))
    assert run("bench/plot.py", source, picture).returncode == 0
    drawn = picture.read_text()
    assert drawn == (REPOSITORY / "bench/results/h200_budgets.svg").read_text(), "the picture is that of the figures"
    assert drawn.count("<circle") == len(found["rows"]) == 10
    ET.fromstring(drawn)
    for row in found["rows"]:
        row["torch_peak_bytes"] = None
    source.write_text(json.dumps(found))
    refused = run("bench/plot.py", source, picture)
    assert refused.returncode == 1
    assert "run bench/activations.py on a GPU" in refused.stderr


def test_checkpoints_beside_training_stand_beside_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    small = ["--gb", "0.03", "--rounds", "1", "--commit", "abc", "--folder", tmp_path, "--json", path]
    beside = ["--async", "--dtype", "bfloat16", "--period", "0.01", "--budget-gb", "none", "0.002"]
    for options in ([], beside):
        done = run("bench/checkpoint.py", *small, *options)
        assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] == torch.__version__
    plain, row = found["runs"]
    assert {plain["commit"], row["commit"]} == {"abc"}
    assert row["command"].startswith("python bench/checkpoint.py --gb 0.03")
    assert all(len(runs) == 1 for runs in plain["rows"].values())
    free, tight = row["beside"]
    assert free["state_bytes"] == pytest.approx(6 * free["parameter_bytes"], rel=1e-3)
    assert free["stall_s"] == free["stall_limit_s"] == 0
    assert (free["extra_limit_bytes"], tight["extra_limit_bytes"]) == (None, 2_000_000 + (256 << 20))
    assert 0 < tight["stall_limit_s"] < 1.1 * tight["write_s"]
    assert "the step after the call" in done.stdout


def test_two_builds_are_compared(tmp_path: Path) -> None:
    path, package = tmp_path / "compare.json", Path(forebay.__file__).parents[1]
    small = ["--small", "--device", "cpu", "--rounds", "1", "--steps", "1", "--rows", "sleep,hybrid-f32"]
    done = run("bench/compare.py", package, package, *small, "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["is_complete"] is True
    assert found["left_out"] == []
    lines = {(line["row"], line["metric"]): line for line in found["comparison"]}
    hybrid = {("hybrid-f32", "step"), ("hybrid-f32", "set-up")}
    assert lines.keys() == {("sleep", "sleep"), ("sleep", "wake"), ("sleep", "first sleep")} | hybrid
    assert 0 <= found["rows"]["hybrid-f32"]["new"][0]["stats"]["host_fraction"] <= 1
    for line in lines.values():
        assert line["new/old"] == pytest.approx(line["new"] / line["old"])
        assert line["by_round"] == [pytest.approx(line["new/old"])]
        assert line["same_bits"] is True
    assert found["builds"]["old"] == found["builds"]["new"]


def test_wrong_options_of_a_comparison_are_refused(tmp_path: Path) -> None:
    package = Path(forebay.__file__).parents[1]
    for options in (["--rows", "fastest"], ["--model", "tiny", "--params", "5"], ["--rounds", "0"]):
        assert run("bench/compare.py", package, package, *options).returncode == 2
    refused = run("bench/compare.py", tmp_path, package)
    assert refused.returncode == 2
    assert f"no forebay package with its extension module in {tmp_path}" in refused.stderr


@pytest.mark.parametrize("without", ["0", "3"])
def test_the_hosts_time_in_a_step_is_taken_apart(tmp_path: Path, without: str) -> None:
    path = tmp_path / "host.json"
    small = ["--device", "cpu", "--tensors", "50", "--steps", "2", "--without", without]
    done = run("bench/host_work.py", *small, "--commit", "abc", "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    assert found["host_s"] <= found["call_s"]
    assert len(found["parts_s"]) == 3
    assert all(seconds > 0 for seconds in found["parts_s"].values())


@pytest.fixture(scope="module")
def overlap(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict]:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("overlap") / "overlap.json"
    rows = "resident,stream,overlap,overlap-4gib,clip-overlap,speculate,speculate-4gib"
    options = ["--small", "--device", "cpu", "--steps", "2", "--rows", rows, "--commit", "abc", "--json", path]
    done = run("bench/overlap.py", *options)
    assert done.returncode == 0, done.stderr
    return done, json.loads(path.read_text())


def test_whole_steps_stand_beside_resident_ones(overlap) -> None:
    done, found = overlap
    assert found["is_complete"] is True
    assert found["commit"] == "abc"
    rows = {row["name"]: row for row in found["rows"]}
    names = ["resident", "stream", "overlap", "overlap-4gib", "clip-overlap", "speculate", "speculate-4gib"]
    assert list(rows) == names
    for name in names[-2:]:
        handle = rows[name]["stats"]["handle"]
        assert handle["accepted"] == handle["speculated"] > 0
    assert rows["resident"]["times_resident"] == 1
    for row in rows.values():
        assert row["label"] in done.stdout
        if "cannot_run" in row:
            assert f"{row['label']}: not available: {row['cannot_run']}" in done.stdout
            continue
        assert len(row["step_s"]) == 2
        assert row["times_resident"] == row["median_step_s"] / rows["resident"]["median_step_s"]
        assert row["last_loss"] < row["first_loss"]
    state_bytes = 12 * found["params"]
    assert rows["stream"]["pinned_bytes"] == pytest.approx(state_bytes, rel=1e-2)
    assert rows["stream"]["stats"]["optimizer"]["fetch_bytes"] == state_bytes


def test_a_step_is_drawn_as_lanes(overlap, tmp_path: Path) -> None:
    source, picture = tmp_path / "found.json", tmp_path / "found.svg"
    source.write_text(json.dumps(overlap[1]))
    done = run("bench/plot.py", source, picture)
    assert done.returncode == 0, done.stderr
    text = "".join(ET.parse(picture).getroot().itertext())
    assert "stream, plain" in text
    assert all(lane in text for lane in ("compute", "fetch", "update", "store"))
    table = run("bench/overlap.py", "--markdown", source)
    assert table.stdout.count("\n| ") == 2 + sum("median_step_s" in row for row in overlap[1]["rows"])
    for row in overlap[1]["rows"]:
        row["timeline"] = None
    source.write_text(json.dumps(overlap[1]))
    assert "run bench/overlap.py without --no-profile" in run("bench/plot.py", source, picture).stderr


def test_overlapped_steps_have_the_bits_of_plain_ones(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "checks.json"
    small = ["--small", "--device", "cpu", "--check", "--check-steps", "3", "--json", path]
    done = run("bench/overlap.py", *small, "--rows", "overlap,overlap-4gib,hybrid-overlap,speculate")
    assert done.returncode == 0, done.stderr
    checks = json.loads(path.read_text())["checks"]
    names = [check["name"] for check in checks]
    assert list(dict.fromkeys(names)) == ["resident", "overlap", "overlap-4gib", "hybrid-overlap", "speculate"]
    assert not any("cannot_run" in check for check in checks if check["name"] == "speculate")
    assert all(check["differing"] == [] for check in checks if "cannot_run" not in check)


def test_a_row_of_steps_that_does_not_exist_is_refused() -> None:
    done = run("bench/overlap.py", "--rows", "overlap,fastest")
    assert done.returncode == 2
    assert "fastest" in done.stderr
    assert run("bench/overlap.py", "--model", "7b", "--rows", "speculate").returncode == 2


def test_idle_time_of_a_profile_has_its_reason() -> None:
    """The wait for what is needed first, a wait beside a copy, and one beside nothing."""

    def event(name: str, begin: float, ms: float, stream: int, kind: str = "kernel") -> dict:
        return {"cat": kind, "name": name, "ts": begin * 1e3, "dur": ms * 1e3, "args": {"stream": stream}}

    names, events = [], []
    for step in range(2):
        at = 100.0 * step
        for name, begin in (("forward", 0), ("backward", 40), ("step", 90)):
            names.append(name)
            events.append(event("spin_kernel(long)", at + begin, 0.001, 7))
        # 10 ms for the embedding, 5 ms for a later layer while state is fetched, 3 ms for nothing.
        events += [event("gemm", at + 10, 25, 7), event("gemm", at + 40, 20, 7), event("gemm", at + 63, 37, 7)]
        events += [event("Memcpy HtoD (Pinned -> Device)", at, 40, 14, "gpu_memcpy")]
        events += [event("Memcpy DtoH (Device -> Pinned)", at + 5, 30, 15, "gpu_memcpy")]
        events += [event("adamw_bf16", at + 5, 2, 16), event("Memset (Device)", at + 62, 0.5, 16, "gpu_memset")]
    names.append("end")
    events.append(event("spin_kernel(long)", 200, 0.001, 7))
    command = "import json, sys, timeline; print(json.dumps(timeline.from_trace(*json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-c", command],
        check=True,
        capture_output=True,
        text=True,
        input=json.dumps([events, names]),
        env=environment(PYTHONPATH=os.pathsep.join([str(REPOSITORY / "bench"), *filter(None, sys.path)])),
    )
    found = json.loads(done.stdout)
    assert found["idle_ms"] == pytest.approx({"tail": 10, "wire": 5, "host": 3}, abs=0.01)
    assert found["busy_ms"] == pytest.approx({"compute": 82, "fetch": 40, "update": 2, "store": 30}, abs=0.01)
    assert found["lanes_ms"]["compute"][0] == [10, 35, 100]
    assert [name for name, _, _ in found["parts_ms"]] == ["forward", "backward", "step"]


def test_muon_stands_beside_resident_state(tmp_path: Path) -> None:
    path = tmp_path / "muon.json"
    done = run(
        "bench/muon.py", "--device", "cpu", "--steps", "2", "--wire-gbps", "5", "--commit", "abc", "--json", path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["torch"]["times_resident"] == rows["train-torch"]["times_resident"] == 1
    assert rows["torch"]["pinned_bytes"] == 0
    # One f32 for each of Muon's elements; AdamW has two.
    count, in_muon = rows["torch"]["parameters"], rows["torch"]["in_muon"]
    for name in ("forebay-muon", "train-overlap-muon"):
        assert rows[name]["payload_bytes"] == 4 * in_muon
        assert rows[name]["floor_s"] == pytest.approx(4 * in_muon / 5e9)
    for name in ("forebay", "train-forebay", "train-overlap"):
        assert rows[name]["payload_bytes"] == 4 * in_muon + 8 * (count - in_muon)
    assert len(rows["train-overlap"]["exposed_s"]) == 2
    assert found["differing"] == []
    assert len({row["muon_digest"] for row in found["rows"]}) == 3
    assert all(row["label"] in done.stdout for row in found["rows"])
    assert run("bench/muon.py", "--rows", "sgd").returncode == 2


def test_formats_of_state_stand_beside_f32(tmp_path: Path) -> None:
    path, picture, again = (tmp_path / name for name in ("quality.json", "quality.svg", "again.svg"))
    rows = ["--rows", "f32,compact,8bit,torch", "--device", "cpu"]
    files = ["--commit", "abc", "--json", path, "--plot", picture]
    done = run("bench/quality.py", "--quick", *rows, "--jobs", "2", *files)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    assert found["text"]["held_out_bytes"] > 0
    assert len(found["text"]["sha256"]) == 64
    ran = {row["name"]: row for row in found["rows"] if "runs" in row}
    f32, compact = ran["f32"], ran["compact"]
    assert (f32["from_f32"], f32["within_f32_spread"]) == (0, True)
    for row in ran.values():
        assert [one["seed"] for one in row["runs"]] == [0, 1]
        losses = [one["held_out_loss"] for one in row["runs"]]
        assert row["mean"] == pytest.approx(sum(losses) / 2)
        assert row["spread"] == max(losses) - min(losses)
        assert row["from_f32"] == row["mean"] - f32["mean"]
        for one in row["runs"]:
            assert len(one["held_out"]) == len(found["noted_steps"]["held_out"]) == 4
            assert len(one["trained"]) == len(found["noted_steps"]["trained"]) == 40
            assert one["held_out"][-1] < one["held_out"][0]
    # Seeds differ, and so do formats; f32 and compact masters do not.
    assert len({one["digest"] for row in ran.values() for one in row["runs"]}) == 2 * (len(ran) - 1)
    assert [one["digest"] for one in f32["runs"]] == [one["digest"] for one in compact["runs"]]
    assert (found["seeds_compared"], found["differing"]) == (2, [])
    assert "equal, bit for bit" in done.stdout
    bytes_each = {name: row["runs"][0]["state_bytes_per_parameter"] for name, row in ran.items()}
    assert (bytes_each["f32"], bytes_each["compact"], bytes_each["torch"]) == (12, 10.125, 4)
    for row in found["rows"]:
        assert row["label"] in done.stdout
        assert row["name"] in ran or f"not run: {row['label']}: {row['cannot_run']}" in done.stdout
    assert run("bench/plot.py", path, again).returncode == 0
    assert again.read_text() == picture.read_text()
    drawn = ET.parse(picture).getroot()
    assert len(drawn.findall("{*}polyline")) == 3 * len(ran)
    assert all(f"{row['label']}: {row['mean']:.4f}" in "".join(drawn.itertext()) for row in ran.values())


def test_formats_are_judged_by_bits_and_by_the_spread_of_seeds() -> None:
    def row(name: str, *losses: float, digest: str = "") -> dict:
        runs = [{"seed": n, "held_out_loss": loss, "digest": f"{digest}{n}"} for n, loss in enumerate(losses)]
        return {"name": name, "runs": runs}

    compact = row("compact", 1.0, 1.5)
    compact["runs"][1]["digest"] = "other"
    rows = [row("f32", 1.0, 1.5), compact, row("near", 1.4, 1.9), row("far", 1.6, 2.1), {"name": "8bit", "error": "x"}]
    command = "import json, sys, quality; print(json.dumps([quality.judged(rows) for rows in json.load(sys.stdin)]))"
    done = subprocess.run(
        [sys.executable, "-c", command],
        check=True,
        capture_output=True,
        text=True,
        input=json.dumps([rows, [row("f32", 1.0), row("compact", 1.0)], [row("compact", 1.0)]]),
        env=environment(PYTHONPATH=os.pathsep.join([str(REPOSITORY / "bench"), *filter(None, sys.path)])),
    )
    several, single, alone = json.loads(done.stdout)
    assert (several["seeds_compared"], several["differing"]) == (2, [1])
    assert [one.get("within_f32_spread") for one in several["rows"]] == [True, True, True, False, None]
    assert [one.get("from_f32") for one in several["rows"]] == [0, 0, *map(pytest.approx, (0.4, 0.6)), None]
    assert (single["seeds_compared"], single["differing"]) == (1, [])
    assert [one["within_f32_spread"] for one in single["rows"]] == [None, None]
    assert (alone["seeds_compared"], alone["rows"][0]["from_f32"]) == (0, None)


def test_a_run_of_a_format_that_hangs_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    small = ["--quick", "--device", "cpu", "--rows", "f32", "--seeds", "1", "--limit-s", "0.001", "--json", path]
    done = run("bench/quality.py", *small)
    assert done.returncode == 1
    assert json.loads(path.read_text())["rows"][0]["error"] == "no end after 0.001 s"


@pytest.mark.parametrize("wrong", [["--rows", "f32,4bit"], ["--rows", "torch", "--plot", "found.svg"]])
def test_wrong_rows_of_formats_are_refused(wrong: list[str]) -> None:
    done = run("bench/quality.py", *wrong)
    assert done.returncode == 2
    assert "4bit" in done.stderr or "--plot needs the row f32" in done.stderr
