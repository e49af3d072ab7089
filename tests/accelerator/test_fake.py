"""The fake accelerator itself: what it must catch, it catches."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from support import fake

SIZE = 1 << 16


def test_it_is_the_accelerator_and_computes_what_the_cpu_does(device: torch.device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    )
    data, target = torch.randn(16, 32), torch.randint(8, (16,))
    loss = torch.nn.functional.cross_entropy(model(data), target)
    loss.backward()
    expected = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    with fake.delays(0.3):
        model.to(device)
        loss = torch.nn.functional.cross_entropy(model(data.to(device)), target.to(device))
        loss.backward()
        found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        for value, wanted in zip(found, expected, strict=True):
            assert value.device == device
            torch.testing.assert_close(value.cpu(), wanted)


def test_the_host_cannot_touch_its_memory() -> None:
    code = """
        import ctypes, torch
        from support import fake
        fake.enable()
        tensor = torch.ones(8, device="fake")
        ctypes.string_at(tensor.data_ptr(), 4)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, env={"PYTHONPATH": sys.path[0]})
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("kind", ["copy in", "operation in place", "operation", "copy out"])
def test_work_on_two_streams_is_ordered_by_events_alone(device: torch.device, kind: str) -> None:
    other, event = torch.Stream(device=device), torch.Event(device=device)
    for ordered in (True, False):
        host = torch.full((SIZE,), 2.0).pin_memory()
        data = torch.ones(SIZE, device=device)
        torch.accelerator.synchronize()
        if kind == "copy out":
            host.fill_(1.0)
            data.fill_(2.0)
            torch.accelerator.synchronize()
        fake.sleep(50)
        if kind == "copy in":
            data.copy_(host, non_blocking=True)
        elif kind == "operation in place":
            data.mul_(2.0)
        elif kind == "operation":
            data = data + 1.0
        else:
            host.copy_(data, non_blocking=True)
        event.record()
        if ordered:
            other.wait_event(event)
        with other:
            result = host.clone() if kind == "copy out" else data.cpu()
            if kind == "copy out" and ordered:
                other.synchronize()
                result = host.clone()
        assert torch.equal(result, torch.full((SIZE,), 2.0)) == ordered
        torch.accelerator.synchronize()


def test_a_wait_that_is_ignored_shows(device: torch.device) -> None:
    other, event = torch.Stream(device=device), torch.Event(device=device)
    for ignored in (-1, 0):
        data = torch.ones(SIZE, device=device)
        torch.accelerator.synchronize()
        fake.waits(ignored)
        fake.sleep(50)
        data.add_(1)
        event.record()
        other.wait_event(event)
        with other:
            assert torch.equal(data.cpu(), torch.full((SIZE,), 2.0)) == (ignored == -1)
        assert fake.waits() == 1
        torch.accelerator.synchronize()


def test_submitting_does_not_wait(device: torch.device) -> None:
    data, host = torch.ones(SIZE, device=device), torch.ones(SIZE).pin_memory()
    event = torch.Event(device=device)
    fake.sleep(200)
    data.mul_(3.0).add_(host.to(device, non_blocking=True))
    torch._foreach_mul_([data], 2.0)
    total = data.sum()
    event.record()
    assert not event.query()
    event.synchronize()
    assert total.item() == 8.0 * SIZE


def test_memory_that_was_given_back_is_used_again_at_once(device: torch.device) -> None:
    data = torch.ones(SIZE, device=device)
    address = data.data_ptr()
    del data
    again = torch.empty(SIZE, device=device)
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_events_have_times(device: torch.device) -> None:
    begin, end = torch.Event(device=device, enable_timing=True), torch.Event(device=device, enable_timing=True)
    stream = torch.Stream(device=device)
    begin.record(stream)
    with stream:
        fake.sleep(20)
    end.record(stream)
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) >= 20


def test_a_failed_stream_fails_what_waits_for_it_and_nothing_else(device: torch.device) -> None:
    stream, end = torch.Stream(device=device), torch.Event(device=device)
    with stream:
        fake.trap()
    end.record(stream)
    with pytest.raises(RuntimeError, match="a trap was run"):
        end.synchronize()
    # What waits for it fails too, and others do not.
    third, after = torch.Stream(device=device), torch.Event(device=device)
    third.wait_event(end)
    after.record(third)
    with pytest.raises(RuntimeError, match="a trap was run"):
        after.synchronize()
    torch.accelerator.current_stream().synchronize()
    fake.repair()


def test_memory_is_counted_and_can_be_short(device: torch.device) -> None:
    before = torch.accelerator.memory_allocated(device)
    data = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_allocated(device) == before + data.nbytes
    with fake.capacity(before + (2 << 20)), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 20, dtype=torch.uint8, device=device)
    storage = data.untyped_storage()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated(device) == before


def test_what_it_does_not_have_is_refused(device: torch.device) -> None:
    with fake.without(streams=True), pytest.raises(RuntimeError, match="no streams"):
        torch.Stream(device=device)
    with fake.without(pinned=True), pytest.raises(RuntimeError, match="no page-locked memory"):
        torch.empty(8, pin_memory=True)
