"""A fake accelerator for tests: a device of torch with memory, streams and events of its own, on the CPU.

``fake.cpp`` says how it behaves. :func:`enable` builds it, once for each version of torch and of that file, and makes
it torch's accelerator for the rest of the process, under the name ``fake``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import cpp_extension

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "fake"
_SOURCE = Path(__file__).with_name("fake.cpp")
_DEVICES = 2


def build() -> Path:
    """Return the library, compiled now if it was not.

    Compiled without ninja, which ``cpp_extension.load`` asks for: it is one file.
    """
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    made_of = "\n".join([torch.__version__, *flags, _SOURCE.read_text()])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    library = Path(root, "forebay_fake", f"{key}.so")
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        libraries = [option for path in cpp_extension.library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
        # Another process may build it too: the name appears when the file is whole.
        handle, made = tempfile.mkstemp(dir=library.parent, suffix=".so")
        os.close(handle)
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, *flags, *includes, str(_SOURCE), "-o", made, *libraries, "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the fake accelerator does not build: {done.stderr}")
        os.replace(made, library)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    path = str(build())
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    library.fake_delays.argtypes = [ctypes.c_int64, ctypes.c_uint64]
    library.fake_capacity.argtypes = [ctypes.c_int64]
    library.fake_has.argtypes = [ctypes.c_bool, ctypes.c_bool]
    library.fake_waits.argtypes, library.fake_waits.restype = [ctypes.c_int64], ctypes.c_int64
    library.fake_sleep.argtypes = [ctypes.c_int64]
    return library


@functools.cache
def enable() -> None:
    """Make it torch's accelerator; there is no way back in this process."""
    library = _library()
    module: Any = types.ModuleType("torch.fake")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: _DEVICES
    module.current_device = library.fake_current_device
    module.set_device = lambda device: library.fake_set_device(torch.device(NAME, device).index)
    module.manual_seed_all = lambda _seed: None
    # Without it torch takes the device for one that is not in use, and synchronize does nothing.
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._sleep = lambda cycles: library.fake_sleep(cycles)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    sys.modules["torch.fake"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def trap() -> None:
    """Make the current stream fail."""
    _library().fake_trap()


def repair() -> None:
    """Let streams that failed take work again."""
    _library().fake_repair()


def sleep(ms: float) -> None:
    """Keep the current stream busy."""
    _library().fake_sleep(int(ms * 1e6))


@contextmanager
def delays(ms: float, seed: int = 0) -> Iterator[None]:
    """Delay a third of all work by up to so long."""
    _library().fake_delays(int(ms * 1000), seed)
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        _library().fake_delays(0, 0)


@contextmanager
def without(*, streams: bool = False, pinned: bool = False) -> Iterator[None]:
    """Pretend that the device has no streams, or no page-locked memory."""
    _library().fake_has(not streams, not pinned)
    try:
        yield
    finally:
        _library().fake_has(True, True)


@contextmanager
def capacity(bytes_: int) -> Iterator[None]:
    """Let each device have so much memory."""
    _library().fake_capacity(bytes_)
    try:
        yield
    finally:
        _library().fake_capacity(2 << 30)


def waits(ignored: int = -1) -> int:
    """Return how many waits of streams there were since the last call, and ignore one of those that follow."""
    return int(_library().fake_waits(ignored))
