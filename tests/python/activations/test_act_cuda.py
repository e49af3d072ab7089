"""On a GPU: peak memory is a matter of the program, not of timing; streams, captures and delays change nothing."""

import gc

import pytest
import torch

from support.offload import Block, Stack, assert_nothing_left, gradients, offloaded, train
from support.tensors import assert_same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
WIDTH, ROWS = 512, 4096


class Paced(Block):
    """A layer that holds the GPU up, or waits for it."""

    pace = "free"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hold up, then run."""
        if self.pace == "slow GPU":
            torch.cuda._sleep(3_000_000)
        elif self.pace == "slow host":
            torch.cuda.synchronize()
        return super().forward(x)


def model(depth: int = 6) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Paced(WIDTH) for _ in range(depth))).to(CUDA)


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)).to(CUDA)


def peak(run) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"fraction": 0.5}, {"max_in_flight_bytes": None}], ids=str
)
def test_the_peak_is_a_matter_of_the_program(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model(), rows()
    expected = train(net, x)
    without = peak(lambda: train(net, x))
    with offloaded(net, keep_last=1, **options) as handle:
        train(net, x)
        peaks = {}
        for pace in ("free", "slow GPU", "slow host", "free"):
            monkeypatch.setattr(Paced, "pace", pace)
            peaks[pace] = peak(lambda: assert_same(expected, train(net, x)))
        assert len(set(peaks.values())) == 1, peaks
        assert peaks["free"] < without
        assert_nothing_left(handle)


def test_nothing_relies_on_record_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise AssertionError("record_stream was called")

    net, x = model(), rows()
    expected = train(net, x)
    monkeypatch.setattr(torch.Tensor, "record_stream", refuse)
    with offloaded(net):
        assert_same(expected, train(net, x))


@pytest.mark.parametrize("window", [1, 40 << 20, None])
def test_memory_used_again_at_once(window: int | None) -> None:
    """The allocator hands memory out again as soon as it is free; a late GPU must not find it overwritten."""
    net, x = model(), rows()
    expected = train(net, x)
    with offloaded(net, max_in_flight_bytes=window) as handle:
        for _ in range(3):
            torch.cuda._sleep(20_000_000)
            found = train(net, x)
            noise = [torch.full_like(x, float("nan")) for _ in range(20)]
            assert_same(expected, found)
            del noise
        assert_nothing_left(handle)


def test_on_a_stream_of_the_users() -> None:
    net, x = model(), rows()
    expected = train(net, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with offloaded(net, max_in_flight_bytes=None) as handle:
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)
            found = train(net, x)
        torch.cuda.current_stream().wait_stream(side)
        assert_same(expected, found)
        del found
        assert_nothing_left(handle)


def test_a_capture_elsewhere_goes_on() -> None:
    net, x = model(), rows()
    with offloaded(net, max_in_flight_bytes=1 << 40) as handle:
        loss = net(x).square().mean()  # stores are under way now
        static = torch.zeros(1024, device=CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            static += 1
        loss.backward()
        expected = gradients(net)
        graph.replay()
        torch.cuda.synchronize()
        assert static.sum().item() == 1024
        assert handle.stats()["stored_bytes"] > 0
    assert_same(expected, train(net, x)[:-1])


def test_layers_inside_a_capture_are_left_alone() -> None:
    net, x = model(depth=2), rows(64)
    train(net, x)
    with offloaded(net) as handle:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            train(net, x)
        torch.cuda.current_stream().wait_stream(side)
        before = handle.stats()["stored_bytes"]
        net.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            net(x).square().mean().backward()
        graph.replay()
        torch.cuda.synchronize()
        assert handle.stats()["stored_bytes"] == before


def test_no_memory_to_fetch_ahead_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model(), rows()
    expected = train(net, x)
    with offloaded(net, max_in_flight_bytes=64 << 20) as handle:
        train(net, x)
        (engine,) = handle._saver.engines.values()
        empty, refused = torch.empty, []

        def scarce(*sizes, **options):
            # Every other time there is no room for what is fetched ahead.
            if options.get("dtype") is torch.uint8 and len(refused) % 2 == 0 and not engine.now:
                refused.append(1)
                raise torch.OutOfMemoryError("no room, on purpose")
            refused.append(0)
            return empty(*sizes, **options)

        fetch = engine.fetch
        engine.now = False

        def watched(entry, length, *, now, stream):
            engine.now = now
            fetch(entry, length, now=now, stream=stream)

        engine.fetch = watched
        monkeypatch.setattr(torch, "empty", scarce)
        found = train(net, x)
        monkeypatch.undo()
        assert sum(refused) > 0
        assert_same(expected, found)
        assert_nothing_left(handle)
