"""Saves of a Trainer's run in the background: everything that the Trainer's own model-only checkpoint leaves out.

The Trainer writes ``checkpoint-N`` with the model and its own state. The folder ``forebay`` inside it has the trained
parameters, the optimizer, the schedule, the scaler and the random state of every rank. It is complete when its
manifest is there, which may be some steps later.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from forebay import _core, checkpoint
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "forebay"
"""The name of the folder inside a checkpoint of the Trainer."""


def trained(model: torch.nn.Module) -> torch.nn.Module:
    """Return a module that has only the trained parameters, under their names in the model.

    Frozen weights do not change, and a save that has them would be as large as the base model of an adapter.
    """
    view = torch.nn.Module()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            *path, last = name.split(".")
            inner = view
            for part in path:
                if part not in inner._modules:
                    inner.add_module(part, torch.nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(last, parameter)
    return view


def complete(folder: Path) -> Path | None:
    """Return forebay's checkpoint in a checkpoint of the Trainer, or None if there is no complete one."""
    path = folder / FOLDER
    if not path.is_dir():
        return None
    try:
        _core.latest_checkpoint(path)
    except CheckpointError:
        return None
    return path


def newest(output_dir: str) -> Path:
    """Return the newest checkpoint of the Trainer whose save in the background is complete."""
    found = sorted(_checkpoints(Path(output_dir)), reverse=True)
    for _, folder in found:
        if complete(folder) is not None:
            return folder
    seen = ", ".join(folder.name for _, folder in found) or "no checkpoint"
    raise CheckpointError(f"no checkpoint in {output_dir} is complete; it has {seen}")


def _checkpoints(output_dir: Path) -> Iterator[tuple[int, Path]]:
    for folder in output_dir.glob("checkpoint-*"):
        if (number := re.fullmatch(r"checkpoint-(\d+)", folder.name)) and folder.is_dir():
            yield int(number[1]), folder


class Saves:
    """The saves of one run.

    Parameters
    ----------
    options
        Options of ``forebay.checkpoint.async_save``.
    model, optimizer, scheduler, scaler
        What is trained, without wrappers. There may be no scaler.
    """

    def __init__(
        self,
        options: dict[str, Any],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scaler: Any,
    ) -> None:
        self._options = options
        self._trained = trained(model)
        self._optimizer, self._scheduler, self._scaler = optimizer, scheduler, scaler
        self._running: checkpoint.Handle | None = None
        # What to set when the Trainer has skipped the batches of the steps before.
        self._random: dict[str, Any] | None = None

    def begin(self, folder: Path) -> None:
        """Begin to save the present state into a checkpoint of the Trainer. Every rank calls it."""
        self.wait()
        extra = {
            "random": _of_all_ranks(_random_state()),
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
        }
        path = folder / FOLDER
        self._running = checkpoint.async_save(path, self._trained, self._optimizer, extra=extra, **self._options)

    def wait(self) -> None:
        """Wait for the running save; raise its error if it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def load(self, path: Path) -> None:
        """Load a save. ``set_random_state`` sets its random state later."""
        extra = checkpoint.load(path, self._trained, self._optimizer) or {}
        for name, owner in (("scheduler", self._scheduler), ("scaler", self._scaler)):
            if owner is not None and extra.get(name) is not None:
                owner.load_state_dict(extra[name])
        ranks = extra.get("random", [])
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._random = ranks[rank] if rank < len(ranks) else None

    def set_random_state(self) -> None:
        """Set the random state that was loaded, once."""
        state, self._random = self._random, None
        if state is None:
            return
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        if state["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
            kind, words, *rest = state["numpy"]
            numpy.random.set_state((kind, words.tolist(), *rest))
        torch.set_rng_state(state["torch"].cpu())
        if state["device"] is not None and (module := _device_module()) is not None:
            module.set_rng_state(state["device"].cpu())


def _random_state() -> dict[str, Any]:
    """Return the state of the generators that a Trainer's run uses."""
    version, words, gauss = random.getstate()
    found = None
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, numbers, *rest = numpy.random.get_state()
        found = [kind, torch.tensor(numbers.tolist()), *rest]
    module = _device_module()
    return {
        "device": module.get_rng_state().cpu() if module is not None else None,
        "numpy": found,
        "python": [version, torch.tensor(words), gauss],
        "torch": torch.get_rng_state(),
    }


def _device_module() -> Any:
    """Return torch's module of the accelerator, or None without one."""
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
