"""Compile the CUDA kernels to the PTX that ships inside the binary, a file for each, and two more for each rule.

Needs NVRTC 12.4 (``nvidia-cuda-nvrtc-cu12``), no GPU and no driver. PTX of that version runs on every driver from 550
on; a newer NVRTC would ask for a newer driver.

usage: python scripts/make_ptx.py [--check]
"""

import argparse
import ctypes
import importlib.metadata
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "crates" / "device" / "src" / "cuda" / "kernels"
PACKAGE = "nvidia-cuda-nvrtc-cu12"
VERSION = (12, 4)
# The oldest architecture with everything the kernels use; the driver compiles for the GPU it finds. --fmad=false:
# every fused multiply-add is written out.
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++17", "--fmad=false"]


def load_nvrtc() -> ctypes.CDLL:
    """Load the NVRTC that the pinned package brings, with its builtins first."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"error: {PACKAGE} is not installed\nhint: run `make setup` and use .venv/bin/python")
    libraries = {Path(str(file)).name.split(".so")[0]: str(file.locate()) for file in files if ".so" in str(file)}
    builtins = next(path for name, path in libraries.items() if name.startswith("libnvrtc-builtins"))
    ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(libraries["libnvrtc"])
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != VERSION:
        sys.exit(
            f"error: NVRTC {major.value}.{minor.value} found, the shipped PTX is made with {VERSION[0]}.{VERSION[1]}"
        )
    return nvrtc


def sources() -> dict[str, str]:
    """Return the CUDA C++ of each PTX file, by its name."""
    found = {}
    for path in sorted(FOLDER.glob("*.cu")):
        text = path.read_text()
        found[path.stem] = text
        if "UPDATE_KERNELS(" in text:
            # A rule: the same arithmetic once more for compact masters, and for columns in fewer bits.
            for kind in ("compact", "packed"):
                found[f"{path.stem}_{kind}"] = f'#include "{kind}.cuh"\n#include "{path.name}"\n'
    return found


def compile_ptx(nvrtc: ctypes.CDLL, name: str, source: str) -> str:
    """Compile CUDA C++ to PTX text."""
    headers = sorted([*FOLDER.glob("*.cuh"), *FOLDER.glob("*.cu")])
    texts = (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers])
    names = (ctypes.c_char_p * len(headers))(*[header.name.encode() for header in headers])
    program = ctypes.c_void_p()
    options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), len(headers), texts, names)
    status = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status != 0:
        sys.exit(f"error: {name}.cu does not compile\n{log.value.decode()}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


def main() -> None:
    """Write the PTX of every kernel file, or with --check say whether it is what the files give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the .ptx files instead of writing them")
    check = parser.parse_args().check
    nvrtc = load_nvrtc()
    stale = {path.name for path in FOLDER.glob("*.ptx")}
    for name, source in sources().items():
        path = FOLDER / f"{name}.ptx"
        stale.discard(path.name)
        ptx = compile_ptx(nvrtc, name, source)
        if not check:
            path.write_text(ptx)
            print(f"wrote {path.name}: {len(ptx)} bytes, {ptx.count('.entry')} kernels")
        elif not path.exists() or path.read_text() != ptx:
            sys.exit(f"error: {path.name} is not what the kernel files give\nhint: run `make ptx` and commit it")
    if stale:
        sys.exit(f"error: no source for {', '.join(sorted(stale))}\nhint: delete what no kernel file makes")


if __name__ == "__main__":
    main()
