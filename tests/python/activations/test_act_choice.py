"""What leaves the device and what stays: thresholds, fractions, layers, parameters; and what is said about it."""

import gc
import warnings

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import forebay
from support.offload import (
    ACTIVATION_BYTES,
    ROWS,
    WIDTH,
    Block,
    Of,
    Stack,
    assert_nothing_left,
    data,
    engines,
    gradients,
    offloaded,
    stack,
    train,
)
from support.tensors import assert_same


def stored(model: torch.nn.Module, x: torch.Tensor, **options: object) -> float:
    with offloaded(model, **options) as handle:
        train(model, x)
        return handle.stats()["stored_bytes"]


def test_smaller_tensors_stay(device: torch.device) -> None:
    model, x = stack(device), data(device)
    everything = stored(model, x, min_bytes=0)
    large = stored(model, x, min_bytes=ACTIVATION_BYTES)
    assert everything > large > stored(model, x, min_bytes=ACTIVATION_BYTES + 1) > 0
    assert stored(model, x, min_bytes=1 << 30) == 0


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_a_fraction_of_the_bytes_leaves(fraction: float, device: torch.device) -> None:
    model, x = stack(device, depth=8), data(device)
    everything = stored(model, x)
    part = stored(model, x, fraction=fraction)
    assert abs(part / everything - fraction) < 2 * ACTIVATION_BYTES / everything + 0.01
    with offloaded(model, fraction=fraction) as handle:
        train(model, x)
        stats = handle.stats()
        assert stats["stored_bytes"] + stats["kept_bytes"] == everything
        assert stats["fraction"] == pytest.approx(fraction)


def test_the_last_layers_stay(device: torch.device) -> None:
    model, x = stack(device, depth=4), data(device)
    for keep_last in (0, 1, 3, 9):
        with offloaded(model, keep_last=keep_last) as handle:
            train(model, x)
            rows = handle.table()
        kept = [row["stored_bytes"] == 0 for row in rows]
        assert kept == [number >= 4 - keep_last for number in range(4)]
        assert all(row["kept_bytes"] > 0 for row in rows if row["kept"])


def test_layers_can_be_chosen(device: torch.device) -> None:
    model, x = stack(device, depth=4), data(device)
    for layers in ([model.layers[1], model.layers[3]], model.layers, "layers"):
        with offloaded(model, layers=layers) as handle:
            train(model, x)
            assert len(handle.table()) == len(list(layers)) if layers != "layers" else 4
            assert all(row["stored_bytes"] > 0 for row in handle.table())


def test_the_outermost_list_with_most_parameters_is_found(device: torch.device) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 4) for _ in range(6))
            self.body = Stack(*(Stack(Block(), Block()) for _ in range(3)))

    model = Model()
    with offloaded(model) as handle:
        assert [layer.module for layer in handle._layers] == list(model.body.layers)


def test_parameters_and_buffers_stay(device: torch.device) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
            self.frozen = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=False)
            self.register_buffer("table", torch.randn(WIDTH, WIDTH) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.weight + x @ self.weight.t() + x @ self.frozen + x @ self.table[:, :].t()
            return x @ self.weight.detach() + x @ self.frozen.data.t() + x @ self.weight.view(-1).view(WIDTH, WIDTH)

    torch.manual_seed(0)
    model = Stack(*(Layer() for _ in range(3))).to(device)
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: list[int] = []
    x = data(device) / 8
    with offloaded(model, min_bytes=1024) as handle:
        model(x)
        for engine in engines(handle):
            save = engine.save

            def watched(tensor, save=save, **options):
                seen.append(tensor.untyped_storage().data_ptr())
                return save(tensor, **options)

            engine.save = watched
        train(model, x)
    assert seen
    assert not owned & set(seen)


def test_parameters_and_their_views_stay_with_save_on_host(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    x = data(device).requires_grad_()
    context = forebay.save_on_host(min_bytes=1024, device=device.type)
    with context:
        loss = (x @ weight + x @ weight.t() + x @ weight.view(-1).view(WIDTH, WIDTH)).sum()
    loss.backward()
    assert context.stats()["stored_bytes"] == x.nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs tensors on two devices")
def test_tensors_of_the_cpu_stay() -> None:
    context = forebay.save_on_host(min_bytes=0)
    tensor = torch.randn(1000)
    assert context.unpack_hook(context.pack_hook(tensor)).data_ptr() == tensor.data_ptr()
    assert context.stats()["stored_bytes"] == 0


def test_by_default_tensors_of_the_cpu_stay_with_save_on_host() -> None:
    context = forebay.save_on_host(min_bytes=0)
    tensor = torch.randn(1000)
    assert context.unpack_hook(context.pack_hook(tensor)).data_ptr() == tensor.data_ptr()


def test_what_cannot_be_copied_stays(device: torch.device) -> None:
    class Sub(torch.Tensor):
        pass

    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(100, 100, device=device)
    plain = torch.randn(100, 100, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = [plain.relu().to_sparse(), plain.relu().to_sparse_csr()]
    complex_pair = torch.randn(100, 100, 2, device=device)
    odd = [
        fake,
        plain.as_subclass(Sub),
        torch.nn.Parameter(plain),
        *sparse,
        torch.view_as_complex(complex_pair).conj(),
        torch._neg_view(plain),
        torch.empty(0, device=device),
        torch.randn((), device=device),
        torch.empty(100, 100, device="meta"),
        plain[:1, :1].expand(100, 100),
    ]
    context = forebay.save_on_host(min_bytes=5, max_in_flight_bytes=1, device=device.type)
    for tensor in odd:
        back = context.unpack_hook(context.pack_hook(tensor))
        assert type(back) is type(tensor) or isinstance(tensor, torch.nn.Parameter)
        assert back.shape == tensor.shape
    assert context.stats()["stored_bytes"] == 0


@pytest.mark.parametrize("link", ["fast", "slow"])
def test_sources_go_at_a_fixed_point(link: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast copies are changes nothing about what is alive when."""
    from forebay._core import Activations
    from forebay.activations import saved as _saved

    if link == "slow" and device.type == "cpu":
        monkeypatch.setattr(_saved, "open_engine", lambda _, *numbers: Activations("cpu", *numbers, 2e7))
    elif device.type == "cpu":
        monkeypatch.setattr(_saved, "open_engine", lambda _, *numbers: Activations("cpu", *numbers))
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=3 * ACTIVATION_BYTES, device=device.type)
    alive, packed, storages = [], [], []
    for _ in range(8):
        tensor = torch.randn(ROWS, WIDTH, device=device)
        packed.append(context.pack_hook(tensor))
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        del tensor
        alive.append([not storage.expired() for storage in storages])
    for step, flags in enumerate(alive):
        expected = [number > step - 3 for number in range(step + 1)]
        assert flags == expected, f"after {step + 1} tensors: {flags}"
    packed.clear()
    assert all(storage.expired() for storage in storages)


def test_fetched_memory_is_bounded_by_the_window(device: torch.device) -> None:
    window = 3 * ACTIVATION_BYTES
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=window, device=device.type)
    packed = [context.pack_hook(torch.randn(ROWS, WIDTH, device=device)) for _ in range(12)]
    (engine,) = engines(context)
    most = 0
    while packed:
        context.unpack_hook(packed.pop())
        most = max(most, sum(storage.nbytes() for storage in engine.held.values()))
    assert most == window


def test_uses_in_reverse_order_are_fetched_ahead(device: torch.device) -> None:
    window = 3 * ACTIVATION_BYTES
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=window, device=device.type)
    packed = [context.pack_hook(torch.randn(ROWS, WIDTH, device=device)) for _ in range(12)]
    (engine,) = engines(context)
    fetches, ahead = [], []
    fetch = engine.fetch

    def watched(entry, length, *, now, stream):
        (fetches if now else ahead).append(entry)
        fetch(entry, length, now=now, stream=stream)

    engine.fetch = watched
    for one in reversed(packed):
        context.unpack_hook(one)
    # The last three are still there; the first use of each other one finds it on its way.
    assert fetches == []
    assert ahead == [one.entry for one in reversed(packed[:-3])]


def test_pinned_memory_does_not_grow_with_varying_lengths(device: torch.device) -> None:
    model = stack(device)
    generator = torch.Generator().manual_seed(0)
    with offloaded(model, min_bytes=0) as handle:
        train(model, data(device, rows=200))
        longest = handle.stats()["pinned_bytes"]
        for _ in range(30):
            rows = int(torch.randint(1, 200, (), generator=generator))
            train(model, data(device, rows=rows))
        assert handle.stats()["pinned_bytes"] <= longest
        assert longest <= 2 * handle.stats()["pinned_peak_bytes"]


def test_running_out_of_pinned_memory_keeps_tensors_with_one_warning(device: torch.device) -> None:
    model, x = stack(device, depth=6), data(device)
    expected = train(model, x)
    budget = 3 * ACTIVATION_BYTES
    with offloaded(model, pinned_budget_bytes=budget) as handle:
        with pytest.warns(UserWarning, match=f"the budget is {budget} bytes.*raise pinned_budget_bytes") as caught:
            found = train(model, x)
        assert len(caught) == 1
        assert_same(expected, found)
        assert_same(expected, train(model, x))  # warnings are errors: there is no second one
        stats = handle.stats()
        assert 0 < stats["pinned_bytes"] <= budget
        assert stats["kept_bytes"] > 0 < stats["stored_bytes"]
        assert_nothing_left(handle)


def test_a_budget_of_nothing_keeps_everything(device: torch.device) -> None:
    model, x = stack(device), data(device)
    expected = train(model, x)
    with offloaded(model, pinned_budget_bytes=0) as handle:
        with pytest.warns(UserWarning, match="no pinned memory"):
            found = train(model, x)
        assert_same(expected, found)
        assert handle.stats()["pinned_bytes"] == handle.stats()["stored_bytes"] == 0


def test_reserving_pins_before_the_first_pass(device: torch.device) -> None:
    model, x = stack(device), data(device)
    with offloaded(model) as handle:
        handle.reserve(4 << 20)
        before = handle.stats()["pinned_bytes"]
        assert before >= 4 << 20
        train(model, x)
        assert handle.stats()["pinned_bytes"] == before
    with offloaded(model, pinned_budget_bytes=1 << 20) as handle, pytest.raises(forebay.OutOfMemoryError) as caught:
        handle.reserve(4 << 20)
    assert caught.value.limit_bytes == 1 << 20


def test_auto_offloads_what_hides(device: torch.device) -> None:
    model, x = stack(device, depth=8), data(device)
    expected = train(model, x)
    with offloaded(model, fraction="auto", keep_last=1, max_in_flight_bytes=None) as handle:
        assert_same(expected, train(model, x))
        assert handle.stats()["fraction"] == 1.0, "all of it, until something has been measured"
        for _ in range(12):
            assert_same(expected, train(model, x))
        stats = handle.stats()
        assert 0.0 < stats["fraction"] <= 1.0
        if device.type == "cpu":
            # The link of these tests is far slower than the computation.
            assert stats["fraction"] < 0.9
        assert_nothing_left(handle)


def test_the_figures_add_up(device: torch.device) -> None:
    model, x = stack(device), data(device)
    with offloaded(model, keep_last=1) as handle:
        train(model, x, passes=2)
        stats, rows = handle.stats(), handle.table()
        for name in ("stored_bytes", "fetched_bytes", "kept_bytes", "stalls"):
            assert sum(row[name] for row in rows) == stats[name]
        assert sum(row["stall_s"] for row in rows) == pytest.approx(stats["stall_s"])
        assert stats["fetched_bytes"] > 0
        if device.type == "cpu":
            assert stats["stalls"] > 0
            assert stats["stall_s"] > 0
            assert all(row["forward_s"] > 0 for row in rows)


def test_autocast(device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return gradients(model)

    expected = run()
    with offloaded(model) as handle:
        assert_same(expected, run())
        assert handle.stats()["fetched_bytes"] > 0
        assert_nothing_left(handle)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_layers(backend: str, how: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model, x = stack(device, depth=3), data(device)
    if how == "in place":
        for layer in model.layers:
            layer.compile(backend=backend)
    else:
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend=backend)
    expected = train(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with offloaded(model) as handle:
            assert_same(expected, train(model, x))
            assert_same(expected, train(model, x))
            assert handle.stats()["fetched_bytes"] > 0
            assert_nothing_left(handle)
    assert_same(expected, train(model, x))


def test_a_layer_without_parameters(device: torch.device) -> None:
    model = Stack(Of(lambda x, w: x @ w), torch.nn.GELU(), Of(lambda x, w: (x @ w).exp())).to(device)
    x = data(device) / 8
    expected = train(model, x)
    with offloaded(model) as handle:
        assert_same(expected, train(model, x))
        assert_nothing_left(handle)


@pytest.mark.parametrize("options", [{}, {"min_bytes": 1 << 30}, {"keep_last": 3}], ids=str)
def test_a_graph_that_is_dropped_frees_its_memory_at_once(options: dict[str, object], device: torch.device) -> None:
    """A saved output that held itself through its own graph would wait for the garbage collector."""
    kept: list[StorageWeakRef] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).exp()
        kept.append(StorageWeakRef(y.untyped_storage()))
        return y.sigmoid()

    model = Stack(*(Of(function) for _ in range(3))).to(device)
    gc.collect()
    gc.disable()
    try:
        with offloaded(model, **options):
            out = model(data(device) / 8)
            del out
            assert all(storage.expired() for storage in kept)
    finally:
        gc.enable()
