"""What Rust errors and panics become in Python."""

import copy
import pickle

import pytest

import forebay
from forebay import _core, errors

BASES = {
    "Error": RuntimeError,
    "AsleepError": forebay.Error,
    "DeviceError": forebay.Error,
    "OutOfMemoryError": MemoryError,
    "OptionError": ValueError,
    "StorageError": OSError,
    "CheckpointError": ValueError,
    "InternalError": forebay.Error,
}

RAISED_FOR = {
    "Device.DeviceAbsent": forebay.DeviceError,
    "Device.DriverTooOld": forebay.DeviceError,
    "Device.KernelsRefused": forebay.DeviceError,
    "Device.OutOfDeviceMemory": forebay.OutOfMemoryError,
    "Device.OutOfPinnedBudget": forebay.OutOfMemoryError,
    "Device.SlabLargerThanMemory": forebay.OutOfMemoryError,
    "Device.ZeroSize": forebay.OptionError,
    "Device.OutOfRange": forebay.OptionError,
    "Device.BadOperands": forebay.OptionError,
    "Device.InvalidOption": forebay.OptionError,
    "Device.StreamFailed": forebay.DeviceError,
    "Device.Unordered": forebay.InternalError,
    "Device.Driver": forebay.DeviceError,
    "Device.Os": forebay.StorageError,
    "Device.Forked": forebay.DeviceError,
    "InvalidOption": forebay.OptionError,
    "PlanMismatch": forebay.OptionError,
    "Checkpoint": forebay.CheckpointError,
    "Distrusted": forebay.CheckpointError,
    "File": forebay.StorageError,
}

SAMPLES = dict(_core._errors_for_test())


def attributes(error: BaseException) -> dict[str, object]:
    """Everything that a copy must have kept."""
    numbers = ("requested_bytes", "available_bytes", "limit_bytes", "errno")
    return {"text": str(error)} | {name: getattr(error, name, None) for name in numbers}


def test_the_list_of_classes_is_complete() -> None:
    assert sorted(BASES) == sorted(errors.__all__)
    assert all(getattr(forebay, name) is getattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_each_class_is_an_error_and_its_builtin_counterpart(name: str, base: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), forebay.Error)
    assert issubclass(getattr(errors, name), base)


def test_every_rust_error_has_a_sample() -> None:
    assert SAMPLES.keys() == RAISED_FOR.keys()


@pytest.mark.parametrize(("variant", "expected"), RAISED_FOR.items())
def test_rust_error_becomes_exception(variant: str, expected: type[Exception]) -> None:
    assert type(SAMPLES[variant]) is expected
    assert str(SAMPLES[variant])


@pytest.mark.parametrize("variant", [name for name, kind in RAISED_FOR.items() if kind is forebay.OutOfMemoryError])
def test_out_of_memory_carries_the_numbers(variant: str) -> None:
    error = SAMPLES[variant]
    assert (error.requested_bytes, error.available_bytes, error.limit_bytes) == (3, 2, 5)
    assert "3 bytes" in str(error)


def test_storage_error_carries_errno_and_keeps_its_text() -> None:
    error = SAMPLES["Device.Os"]
    assert error.errno == 12
    assert str(error).startswith("sample of 3 bytes failed: sample; check the limits of this process")


@pytest.mark.parametrize("variant", RAISED_FOR)
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_exceptions_survive_pickle_and_copy(variant: str, duplicate) -> None:
    error = SAMPLES[variant]
    twin = duplicate(error)
    assert type(twin) is type(error)
    assert attributes(twin) == attributes(error)


def test_panic_becomes_internal_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(forebay.InternalError, match=r"^slot 3 has no owner$"):
        _core._panic_for_test("slot 3 has no owner")
    # The default hook still reports where it happened.
    assert "testing.rs" in capfd.readouterr().err


def test_module_works_after_a_panic(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with pytest.raises(forebay.InternalError):
            _core._panic_for_test("again")
    assert _core.version()


def test_the_gil_is_released_around_work() -> None:
    assert _core._gil_is_released_for_test()
