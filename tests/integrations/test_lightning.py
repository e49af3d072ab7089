"""Lightning: real training through ``Trainer.fit``, with both of its packages."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.integrations.lightning import ForebayCallback, _called
from support.frameworks import Model, batches, import_again, loss_of, pretend_version, weights
from support.lightning_runs import SMALL, fit, loop, make, trainer
from support.processes import environment, python
from support.tensors import assert_same

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    """Each of the packages."""
    return importlib.import_module(request.param)


def test_training_is_that_of_a_plain_loop(pl: Any) -> None:
    assert_same(fit(make(pl), trainer(pl, ForebayCallback())), loop())


def test_activations_are_offloaded_and_nothing_changes(pl: Any) -> None:
    callback = ForebayCallback(activations=SMALL)
    assert_same(fit(make(pl), trainer(pl, callback)), fit(make(pl), trainer(pl)))
    assert callback.offload is not None
    assert callback.offload.stats()["stored_bytes"] > 10 * 3 * 8 * 24 * 4


def test_activations_end_with_fit() -> None:
    pl = importlib.import_module("lightning.pytorch")
    module, callback = make(pl), ForebayCallback(activations=SMALL)

    class Fails(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            raise LookupError("on purpose")

    for callbacks, raises in (((), nullcontext()), ((Fails(),), pytest.raises(LookupError, match="on purpose"))):
        with raises:
            fit(module, trainer(pl, callback, *callbacks))
        assert callback.offload is not None
        stored = callback.offload.stats()["stored_bytes"]
        loss_of(module.model, batches(1)[0]).backward()
        assert callback.offload.stats()["stored_bytes"] == stored > 0


def test_clipping_happens_once_inside_the_step(pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    by_lightning = fit(make(pl), trainer(pl, gradient_clip_val=0.5))
    assert_same(by_lightning, loop(limit=0.5))
    with pytest.raises(AssertionError):
        assert_same(by_lightning, loop())

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("gradients are clipped outside the step")

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", never)
    module, norms = make(pl), []

    class Watch(pl.Callback):  # type: ignore[misc,name-defined]
        def on_before_zero_grad(self, trainer: Any, _: Any, optimizer: Any) -> None:
            norms.append((optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer).max_grad_norm)

    assert_same(fit(module, trainer(pl, ForebayCallback(), Watch(), gradient_clip_val=0.5)), by_lightning)
    # The limit is Lightning's and ends with the step.
    assert norms
    assert set(norms) == {None}


def test_a_module_that_clips_in_some_steps_only(pl: Any) -> None:
    def build() -> Any:
        module = make(pl)

        def configure(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            if module.global_step % 2:
                module.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

        module.configure_gradient_clipping = configure
        return module

    assert_same(fit(build(), trainer(pl, ForebayCallback())), fit(build(), trainer(pl)))


def test_optimizers_of_torch_are_clipped_as_before(pl: Any) -> None:
    found = fit(make(pl, torch.optim.AdamW), trainer(pl, ForebayCallback(), gradient_clip_val=0.5))
    assert_same(found, loop(torch.optim.AdamW, limit=0.5))


def test_a_pass_is_a_call_of_the_model_inside_the_module(pl: Any) -> None:
    module = make(pl)
    assert _called(module, list(module.model.layers)) is module.model
    assert _called(module.model, list(module.model.layers)) is module.model


def test_clipping_by_value_stays_with_lightning(pl: Any) -> None:
    def run(*callbacks: Any) -> list[torch.Tensor]:
        made = trainer(pl, *callbacks, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        return fit(make(pl), made)

    assert_same(run(ForebayCallback()), run())


def test_two_limits_are_said_once_and_the_smaller_one_holds(pl: Any) -> None:
    with pytest.warns(UserWarning, match=r"both by Lightning, to 9.0, and by max_grad_norm, to 0.5") as said:
        found = fit(make(pl, max_grad_norm=0.5), trainer(pl, ForebayCallback(), gradient_clip_val=9.0))
    assert len([one for one in said if "max_grad_norm" in str(one.message)]) == 1
    assert_same(found, loop(limit=0.5))


def moves(pl: Any, patch: pytest.MonkeyPatch, *callbacks: Any, optimizer: Any, path: Path) -> list[Any]:
    """Return what Lightning moved when it resumed and ended."""
    first = trainer(pl)
    fit(make(pl, optimizer), first)
    first.save_checkpoint(path)
    fabric = "lightning.fabric" if pl.__name__ == "lightning.pytorch" else "lightning_fabric"
    module, moved = importlib.import_module(f"{fabric}.utilities.optimizer"), []
    real = module.move_data_to_device

    def move(value: Any, device: Any) -> Any:
        moved.append(value)
        return real(value, device)

    patch.setattr(module, "move_data_to_device", move)
    fit(make(pl, optimizer), trainer(pl, *callbacks, max_epochs=3), ckpt_path=path)
    return moved


def test_state_is_not_moved(pl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, callback = tmp_path / "run.ckpt", ForebayCallback()
    assert moves(pl, monkeypatch, callback, optimizer=forebay.AdamW, path=path) == []
    # Those of torch's optimizers still are: two moments of 26 parameters, at the load and at the end.
    assert len(moves(pl, monkeypatch, callback, optimizer=torch.optim.AdamW, path=path)) == 2 * 2 * 26


RESUMED = """
import os, sys
from pathlib import Path
import lightning.pytorch as pl, torch
from forebay.integrations.lightning import ForebayCallback, _called
from support import lightning_runs as runs
from support.frameworks import weights

folder, resumed = Path(sys.argv[1]), sys.argv[2] == "resume"

class Dies(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 8:
            os._exit(17)

saves = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_on_train_epoch_end=True)
callbacks = [ForebayCallback(activations=runs.SMALL), *([] if resumed else [saves, Dies()])]
made = runs.trainer(pl, *callbacks, enable_checkpointing=not resumed, gradient_clip_val=0.5, precision="bf16-true")
module = runs.make(pl)
runs.fit(module, made, **({"ckpt_path": folder / "epoch=0.ckpt"} if resumed else {}))
torch.save([weights(module), made.optimizers[0].state_dict()], folder / "end.pt")
"""


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    died = python(RESUMED, tmp_path, "begin", timeout=200)
    assert died.returncode == 17, died.stderr[-2000:]
    resumed = python(RESUMED, tmp_path, "resume", timeout=200)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    whole = trainer(pl, ForebayCallback(), gradient_clip_val=0.5, precision="bf16-true")
    expected = fit(make(pl), whole)
    found, state = torch.load(tmp_path / "end.pt", weights_only=False)
    assert_same(found, expected)
    assert_same(state["state"], whole.optimizers[0].state_dict()["state"])
    assert state["param_groups"] == whole.optimizers[0].state_dict()["param_groups"]
    assert "master_param" in state["state"][0]


def test_saves_in_the_background_have_the_state_of_their_moment(pl: Any, tmp_path: Path) -> None:
    states: list[Any] = []
    io = importlib.import_module(f"{pl.__name__}.plugins.io")
    trained = threading.Event()

    class Late(io.TorchCheckpointIO):  # type: ignore[misc,name-defined]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            assert trained.wait(60)
            super().save_checkpoint(*args, **kwargs)

    class Saves(pl.Callback):  # type: ignore[misc,name-defined]
        """Saves once, with Lightning's plugin and with forebay, while the next steps run."""

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                states.extend(copy.deepcopy([module.state_dict(), trainer.optimizers[0].state_dict()["state"]]))
                trainer.save_checkpoint(tmp_path / "plugin.ckpt")
                states.append(forebay.checkpoint.async_save(tmp_path / "forebay", module, trainer.optimizers))

        def on_train_end(self, *_: Any) -> None:
            trained.set()

    fit(make(pl), trainer(pl, ForebayCallback(), Saves(), plugins=[io.AsyncCheckpointIO(Late())]))
    weights_then, state_then, save = states
    save.result()
    found = torch.load(tmp_path / "plugin.ckpt", weights_only=False)
    assert_same(found["state_dict"], weights_then)
    assert_same(found["optimizer_states"][0]["state"], state_then)
    module = make(pl)
    (optimizer,), _ = module.configure_optimizers()
    forebay.checkpoint.load(tmp_path / "forebay", module, optimizer)
    assert_same(module.state_dict(), weights_then)
    assert_same(optimizer.state_dict()["state"], state_then)


def test_two_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.lightning_ddp", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    for found in (first, second):
        assert_same(found["on"], found["off"])
        assert_same(found["on_state"], found["off_state"])
        assert found["on_stored"][0] > 0
    assert_same(first["on"], second["on"])


def test_manual_optimization(pl: Any) -> None:
    seen: list[Any] = []

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = Model(), False

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            first, second = self.optimizers()
            for optimizer in (first, second):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss_of(self.model, batch))
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            if not seen:
                second.max_grad_norm = 9.0
                seen.extend([second.optimizer.max_grad_norm, second.stats()["step_s"], vars(second).keys()])
                second.max_grad_norm = None

        def configure_optimizers(self) -> Any:
            layers = forebay.AdamW(self.model.layers.parameters(), lr=3e-3)
            return [layers, forebay.SGD(self.model.head.parameters(), lr=3e-3, momentum=0.9)]

    module = Module()
    found = fit(module, trainer(pl, ForebayCallback()))
    model = Model()
    first = forebay.AdamW(model.layers.parameters(), lr=3e-3)
    second = forebay.SGD(model.head.parameters(), lr=3e-3, momentum=0.9)
    for batch in 2 * batches(5):
        for optimizer in (first, second):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
    assert_same(found, weights(model))
    # What is set on Lightning's wrapper reaches the optimizer, and nothing of it stays on the wrapper.
    assert seen[0] == 9.0
    assert seen[1] > 0
    assert not {"_options", "_engine", "_flat"} & set(seen[2])


def test_the_callback_can_be_sent_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(ForebayCallback(activations=SMALL)))._options == SMALL


def test_versions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "lightning", "1.9.5")
    with pytest.raises(
        forebay.OptionError, match=r"lightning 1.9.5 is too old for forebay; install lightning>=2.5,<2.7"
    ):
        import_again("lightning")
    pretend_version(monkeypatch, "lightning", "3.1")
    with pytest.warns(UserWarning, match=r"lightning 3.1 is newer than forebay knows"):
        import_again("lightning")


def test_a_machine_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    pretend_version(monkeypatch, "lightning", None)
    with pytest.raises(forebay.OptionError, match=r"lightning is not installed; install lightning>=2.5,<2.7"):
        import_again("lightning")
    assert "forebay.integrations.lightning" in sys.modules
