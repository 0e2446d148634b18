"""Compiles the CUDA sources of `kernels/` to cubins with NVRTC, and keeps them.

Needs no GPU and no CUDA toolkit: headers and compiler are wheels. A cubin's key is the hash of
everything that shapes it, and it is published by an atomic rename, so a half-written one is never
seen and a damaged one is compiled again.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import signal
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from ctatune.config import AnyConfig, Config, digest
from ctatune.errors import CtatuneError, DeviceError
from ctatune.rooms import room

_log = logging.getLogger(__name__)

ARCH = "sm_90a"
_SEAL_BYTES = 32  # a file of the cache is the SHA-256 of the cubin and the cubin
# CuTe's headers leave out many __device__.
_OPTIONS: dict[str, Any] = {"std": "c++17", "device_as_default_execution_space": True}
# Of the widths of WGMMA CuTe declares these, and others when it is asked to.
_COMMON_WIDTHS = (64, 96, 128, 192, 256)
_RARE_WIDTHS = "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n"
_COMPILER_WHEELS = ("nvidia-cutlass", "nvidia-cuda-nvrtc", "nvidia-cuda-cccl")


class CompileError(CtatuneError):
    """NVRTC refused a source; the message holds the first lines of its log."""


def preamble(config: Config, *, skip_wait: bool = False) -> str:
    """The compile-time constants of `kernels/mlp.cu` for a config, as C++ text.

    `skip_wait` builds the negative control: a kernel that does not wait for Y1 and must fail.
    """
    constants = {
        "kUpM": config.up.m,
        "kUpN": config.up.n,
        "kUpSplit": config.up.split_k,
        "kDownM": config.down.m,
        "kDownN": config.down.n,
        "kDownSplit": config.down.split_k,
        "kStages": config.stages,
        "kSlabs": config.d_slabs,
        "kMulticast": config.multicast,
        "kDirect": config.direct,
        "kReduce": config.down_axis == "h",
        "kSwap": config.swap_ab,
        "kSkipWait": skip_wait,
    }
    widths = {tile.m if config.swap_ab else tile.n for tile in config.tiles}  # WGMMA's n
    rare = not widths.issubset(_COMMON_WIDTHS)
    return _RARE_WIDTHS * rare + "".join(
        f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n"
        for name, value in constants.items()
    )


@cache
def source(name: str) -> str:
    """Text of `kernels/<name>.cu`."""
    return (room("kernels") / f"{name}.cu").read_text(encoding="utf-8")


@cache
def kernel_hash() -> str:
    """Identity of the MLP kernel in the store: its code without comments and blank space.

    Compiler and header versions are part of the cubin's key and of the run's record, not of this:
    a measurement outlives a patch release of a wheel, but no change of the code.
    """
    code = re.sub(r"//[^\n]*", "", source("mlp"))
    return digest(re.sub(r"\s+", " ", code).strip())


def present_kernels() -> frozenset[str]:
    """Hashes of the MLP kernel and of older versions whose machine code is the same.

    `kernels/equal.json` names, for a version, those before it that it equals, and what compared
    them. A change of the code that it does not name ends it.
    """
    return _reached(kernel_hash(), "same code")


def equal_kernels() -> frozenset[str]:
    """Hashes of older versions of the MLP kernel whose latencies count as those of the present one,
    as races of both said."""
    return _reached(kernel_hash(), "same code", "as fast") - present_kernels()


def equal_with_whole_tiles() -> frozenset[str]:
    """Hashes of still older versions, whose latencies count where no tile has fewer rows than
    others."""
    links = "same code", "as fast", "as fast with whole tiles"
    return _reached(kernel_hash(), *links) - equal_kernels() - present_kernels()


@cache
def _reached(kernel: str, *kinds: str) -> frozenset[str]:
    """A version and, link by link, those that it equals. (Every row that is read asks for them.)"""
    found, new = set[str](), {kernel}
    while new:
        found |= new
        links = (_equal_kernels().get(name, {}).get(kind, {}) for name in new for kind in kinds)
        new = {old for link in links for old in link} - found
    return frozenset(found)


@cache
def _equal_kernels() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads((room("kernels") / "equal.json").read_text(encoding="utf-8"))


def version_of(wheel: str) -> str | None:
    """The version of an installed wheel."""
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_versions() -> str:
    """Versions of the wheels that shape a cubin, for keys and for the record."""
    return " ".join(f"{wheel} {version_of(wheel) or 'absent'}" for wheel in _COMPILER_WHEELS)


def _include_paths() -> list[str]:
    cutlass = importlib.util.find_spec("cutlass_library")
    nvidia = importlib.util.find_spec("nvidia")
    if cutlass is None or cutlass.origin is None or nvidia is None:
        raise DeviceError("the headers of the wheels nvidia-cutlass and nvidia-cuda-* are missing")
    paths = [Path(cutlass.origin).parent / "source" / "include"]
    for folder in nvidia.submodule_search_locations or ():
        cuda = Path(folder) / "cu13" / "include"
        paths += [cuda, cuda / "cccl"]
    return [str(path) for path in paths if path.is_dir()]


def cache_folder() -> Path:
    """Where cubins lie: `$CTATUNE_CACHE` or the platform's cache folder."""
    chosen = os.environ.get("CTATUNE_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("ctatune") / "cubins"


def cubin(name: str, constants: str = "") -> bytes:
    """The cubin of `kernels/<name>.cu` with the given constants before it, from the cache or new.

    Raises: CompileError when NVRTC refuses the source; DeviceError when headers are missing.
    """
    text = constants + source(name)
    path = _path(name, text)
    try:
        kept = path.read_bytes()
    except OSError:
        kept = b""
    seal, code = kept[:_SEAL_BYTES], kept[_SEAL_BYTES:]
    if code and seal == _seal(code):
        return code
    if kept:
        _log.warning("the cached cubin %s is damaged and is compiled again", path)
    code = _compile(name, text)
    _publish(path, _seal(code) + code)
    return code


def compile_together(configs: Iterable[AnyConfig], seconds: float | None = None) -> None:
    """Put the MLP kernels of the configs among some into the cache, on all CPUs at once: one takes
    some 5 s. What cannot be compiled, or not in time, is left to who asks for it."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    constants = dict.fromkeys(preamble(c) for c in configs if isinstance(c, Config))
    missing = [text for text in constants if not _path("mlp", text + source("mlp")).exists()]
    if len(missing) < 2:
        return
    workers = min(len(missing), len(os.sched_getaffinity(0)))
    ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    pool = ProcessPoolExecutor(workers, get_context("spawn"), *ignore)
    tasks = [pool.submit(cubin, "mlp", text) for text in missing]
    try:
        for task in as_completed(tasks, seconds):
            with suppress(CtatuneError, BrokenProcessPool):
                task.result()
    except TimeoutError:
        _log.info("%d kernels are compiled later", sum(not task.done() for task in tasks))
    finally:
        pool.shutdown(cancel_futures=True)


def _path(name: str, text: str) -> Path:
    key = digest("\0".join((text, ARCH, str(_OPTIONS), compiler_versions())))
    return cache_folder() / f"{name}-{key}.cubin"


def _seal(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def cuda_error() -> type[Exception]:
    """What `cuda.core` raises; it has no public name for it (1.2)."""
    from cuda.core._utils.cuda_utils import CUDAError

    return CUDAError


def _compile(name: str, text: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{name}.cu",
        arch=ARCH,
        include_path=_include_paths(),
        **_OPTIONS,
    )
    try:
        return bytes(Program(text, "c++", options).compile("cubin").code)
    except cuda_error() as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CompileError(f"{name}.cu: " + " | ".join(lines[:6])) from error


def _publish(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_bytes(data)
            new.replace(path)
    except OSError as error:
        _log.warning("cannot keep the cubin %s: %s", path, error)
