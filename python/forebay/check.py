"""Try forebay on this machine's accelerator: ``forebay check --device npu:0``.

Runs the contract of the device, a streamed step, an offload of activations and a sleep, each against plain torch on the
same device, bit for bit, and prints a table.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

import forebay
from forebay import _core
from forebay._device import BACKENDS, default_device, device_named, engine_name, is_cpu, with_backend
from forebay.errors import DeviceError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = tuple[str, str, str]
"""What was tried, how it went, and what there is to say."""

_WIDTH, _LAYERS, _ROWS, _STEPS = 512, 4, 256, 3


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(_WIDTH, _WIDTH) / _WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


def check(device: torch.device | str | None = None, backend: str | None = None) -> list[Row]:
    """Return how each part of forebay works on a device.

    Parameters
    ----------
    device
        The device; by default the accelerator, or the CPU if there is none.
    backend
        As in the optimizers: ``"torch"`` drives CUDA through torch too.
    """
    found = default_device() if device is None else device_named(device)
    name = with_backend(engine_name(found), backend)
    rows: list[Row] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rows += [
            (f"contract: {what}", "ok" if problem is None else "FAILED", problem or "")
            for what, problem in _core.check_contract(name)
        ]
        for what, run in (("step", _step), ("activations", _activations), ("sleep", _sleep)):
            rows.append(_tried(what, run, found, backend))
    texts = dict.fromkeys(str(one.message) for one in warned if "forebay" in str(one.message))
    return [("device", "note", text) for text in texts] + rows


def _tried(what: str, run: Callable[..., tuple[bool, str]], device: torch.device, backend: str | None) -> Row:
    start = time.perf_counter()
    try:
        equal, text = run(device, backend)
    except (RuntimeError, NotImplementedError, DeviceError, OptionError) as error:
        return what, "FAILED", f"{type(error).__name__}: {error}"
    text = f"{text}, {time.perf_counter() - start:.1f} s"
    return what, "ok" if equal else "FAILED", text if equal else f"not the bits of torch; {text}"


def _model(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(_Layer() for _ in range(_LAYERS))).to(device)


def _batch(device: torch.device, number: int) -> torch.Tensor:
    return torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(number)).to(device)


def _train(model: torch.nn.Module, optimizer: Any, device: torch.device, between: Callable[[], object]) -> list[Any]:
    for number in range(_STEPS):
        model(_batch(device, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        between()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _equal(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def _plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    try:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    except (RuntimeError, NotImplementedError, ValueError):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _step(device: torch.device, backend: str | None) -> tuple[bool, str]:
    """Compare a streamed step with torch's, where their bits are promised to be equal, and with a resident one."""
    runs = []
    options: Any = {"lr": 1e-3, "backend": backend}
    for placement in ("stream", "resident"):
        model = _model(device)
        optimizer = forebay.AdamW(model.parameters(), placement=placement, chunk_bytes=1 << 20, **options)
        runs.append(_train(model, optimizer, device, lambda: None))
        optimizer.close()
    if is_cpu(device):
        return _equal(*runs), "streamed equals resident"
    model = _model(device)
    plain = _train(model, _plain(model), device, lambda: None)
    return _equal(runs[0], runs[1]) and _equal(runs[0], plain), "streamed equals resident and torch's own"


def _activations(device: torch.device, _backend: str | None) -> tuple[bool, str]:
    plain, offloaded = _model(device), _model(device)
    handle = forebay.offload_activations(
        offloaded, layers=list(offloaded.children()), fraction=1.0, keep_last=0, min_bytes=0
    )
    gradients = []
    for model in (plain, offloaded):
        for number in range(2):
            model(_batch(device, number)).square().mean().backward()
        gradients.append([parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None])
    stored = int(handle.stats()["stored_bytes"])
    return _equal(*gradients) and stored > 0, f"gradients are equal, {stored} bytes left the device"


def _sleep(device: torch.device, _backend: str | None) -> tuple[bool, str]:
    results = []
    for sleeps in (False, True):
        model = _model(device)
        optimizer = _plain(model)
        sleeper = forebay.Sleeper(model, optimizer) if sleeps else None

        def between(sleeper: forebay.Sleeper | None = sleeper) -> None:
            if sleeper is not None:
                sleeper.sleep()
                sleeper.wake()

        results.append(_train(model, optimizer, device, between))
    return _equal(*results), f"{_STEPS} sleeps change no bit"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, in columns."""
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{what:<{widths[0]}}  {how:<{widths[1]}}  {text}".rstrip() for what, how, text in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if all went well, 1 if something failed, 2 if the device cannot be used."""
    parser = argparse.ArgumentParser(prog="forebay check", description="try forebay on this machine's accelerator")
    parser.add_argument("--device", help="npu:0, xpu:0, cuda:0 or cpu; by default the accelerator")
    parser.add_argument("--backend", choices=BACKENDS, help="drive CUDA through torch too; torch_async refuses waits")
    options = parser.parse_args(arguments)
    try:
        rows = check(options.device, options.backend)
    except (DeviceError, OptionError) as error:
        print(f"error: {error}")
        return 2
    print(table(rows))
    failed = sum(how == "FAILED" for _, how, _ in rows)
    print(
        f"\n{len(rows) - failed} of {len(rows)} went well, with torch {torch.__version__}, forebay {forebay.version()}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
