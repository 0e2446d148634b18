"""What NVML says: the identity of the machine, clocks and power, and who else uses the GPUs.

Only NVML: a process can ask without touching CUDA.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctatune.errors import DeviceError
from ctatune.records import Platform

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # the name pynvml is deprecated, the module not
    import pynvml

_BAD_REASONS = {
    "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "software thermal slowdown": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hardware thermal slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}  # the software power cap is normal under sustained load


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The state of one GPU at one moment."""

    sm_mhz: int
    power_w: float
    temperature_c: int
    reasons: int
    others: int  # processes of others that compute on this GPU


def gpu_count() -> int:
    """GPUs that CUDA would see, by NVML and $CUDA_VISIBLE_DEVICES; 0 where there is no driver."""
    try:
        pynvml.nvmlInit()
        present = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len(visible.replace(",", " ").split()))


class Telemetry:
    """Readings of the GPUs with these UUIDs (CUDA's), which this process holds a lock on.

    Raises: DeviceError when NVML does not know one or another ctatune has its lock.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        try:
            pynvml.nvmlInit()
            names = [f"GPU-{uuid.removeprefix('GPU-')}" for uuid in uuids]
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names]
        except pynvml.NVMLError as error:
            raise DeviceError(f"NVML does not know the GPUs of CUDA: {error}") from error
        self._locks = [_lock(pynvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]

    def read(self) -> list[Reading]:
        """One reading a GPU."""
        return [_read(handle) for handle in self._handles]

    def energies_j(self) -> list[float]:
        """Energy that each GPU took since the driver was loaded; none where NVML does not count."""
        try:
            mj = [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles]
        except pynvml.NVMLError:
            return []
        return [each / 1000 for each in mj]

    def marks(self, readings: Sequence[Reading]) -> list[str]:
        """What forbids that a number taken at these readings serves; empty when nothing does."""
        return sorted({mark for reading in readings for mark in _marks(reading)})

    def state(
        self, before: list[Reading], after: list[Reading], **more: object
    ) -> dict[str, object]:
        """For the record: readings before and after, and `marks` that forbid serving the row."""
        marks = self.marks(before + after)
        state = {"before": list(map(asdict, before)), "after": list(map(asdict, after))} | more
        return state | {"marks": marks} if marks else state

    def platform(self, *, sm_count: int, l2_bytes: int) -> Platform:
        """The identity of this machine, which has as many GPUs as are held."""
        handle = self._handles[0]
        gpu = pynvml.nvmlDeviceGetName(handle)
        link = _link(handle)
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Platform(
            name=re.sub(r"[^a-z0-9]+", "-", f"{gpu} {link}".lower()),
            gpu=gpu,
            gpus=int(pynvml.nvmlDeviceGetCount()),
            link=link,
            sm_count=sm_count,
            l2_bytes=l2_bytes,
            power_limit_w=round(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            driver=pynvml.nvmlSystemGetDriverVersion().split(".")[0],
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        )


def _read(handle: Any) -> Reading:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return Reading(
        sm_mhz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        power_w=pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        temperature_c=pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        reasons=pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        others=max(0, len(processes) - 1),  # we are one; in containers pids are not ours to see
    )


def _marks(reading: Reading) -> list[str]:
    marks = [name for name, bit in _BAD_REASONS.items() if reading.reasons & bit]
    return [*marks, "another process computes on the GPU"] if reading.others else marks


def _link(handle: Any) -> str:
    """`NV18` for 18 active NVLinks, `PCIe` for none."""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError:
            break
    return f"NV{active}" if active else "PCIe"


def _lock(uuid: str) -> int:
    """An exclusive lock for the life of this process: two tuners on one GPU disturb each other."""
    path = Path(tempfile.gettempdir()) / f"ctatune-{uuid}.lock"
    try:
        file = _open_lock(path)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DeviceError(f"another ctatune measures on {uuid} (lock {path})") from error
    except OSError as error:
        raise DeviceError(f"cannot lock {uuid} ({path}): {error.strerror}") from error
    return file


def _open_lock(path: Path) -> int:
    """Any user may have made the file; a lock needs no more than to read it."""
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
