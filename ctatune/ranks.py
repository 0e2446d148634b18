"""The processes whose GPUs run an `Mlp` together: one for all GPUs, or one for each (a rank).

Ranks do the same things in the same order. For what allocates or chooses they meet: each says
where it is, how its part went and what the others must know, in one all-gather of bytes, so that
all go on or all raise. Calls of a number of tokens that is ready meet only in the kernel.

A rank reaches memory of the others by CUDA IPC, from its own GPU alone. Handles are exchanged for
whole allocations (in multiples of 2 MiB, which the driver shares with nothing else); flags of
schedules are pieces of them that come and go, at the same places on every rank.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import json
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from cuda.bindings import driver

from ctatune.choice import Choice
from ctatune.config import Config, parse_config
from ctatune.errors import CtatuneError, DeviceError, UsageError
from ctatune.gpus import PROBE_BYTES, Arena, Gpus, check
from ctatune.jit import kernel_hash
from ctatune.plans import Plan
from ctatune.problem import MAX_GPUS
from ctatune.shared import Copy

BLOCK_BYTES = 2 << 20  # smaller allocations may share one with memory that is not for others
_PIECE_BYTES = 4096  # of a block, at least
_PROBE_PATTERN = 0x5A17D000
_CLOSING = "closing"

Exchange = Callable[[bytes], Sequence[bytes]]
Ends = tuple[tuple[int, ...], tuple[Copy, ...]]


class Processes:
    """Here one, which has all GPUs: it agrees with itself, and peers store where it says. `here`
    are the numbers, in a schedule, of this process's GPUs."""

    def __init__(self, here: Sequence[int]) -> None:
        self.here = here

    def connect(self, gpus: Gpus) -> None:
        """Be ready to give memory."""
        self._gpus, self._arena = gpus, Arena(gpus)

    def gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """What `make` gives in each process (JSON can hold it); `what` is the name of this step.

        Raises: in all of them what `make` raises in one; UsageError when they are not at one step.
        """
        del what
        return [make()]

    def same(self, what: str, make: Callable[[], Any]) -> None:
        """Raise UsageError unless `make` gives the same in each process."""
        first, *others = self.gather(what, make)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise UsageError(f"{what} differs: rank 0 has {first}, rank {rank} has {other}")

    def plan(self, m: int, of: Callable[[int], Plan]) -> Plan:
        """The plan for m tokens in the first process."""
        return of(m)

    def memory(self, what: str, sizes: Sequence[int]) -> tuple[int, ...]:
        """Memory of these sizes on each GPU (0: none), until `leave`: pointers of this process."""
        del what
        return tuple(self._arena.alloc(g, size) if size else 0 for g, size in enumerate(sizes))

    def zeros(self, arena: Arena, nbytes: int) -> tuple[int, ...]:
        """Zeros on each GPU, which peers may add to from now on, until `arena` is closed."""
        return tuple(arena.zeros(gpu, nbytes) for gpu in self.here)

    def ends(self, out: tuple[int, ...], own: tuple[int, ...], nbytes: int) -> Ends:
        """Where kernels store Y2 for `out` on the first GPUs here, with our own room elsewhere, and
        what is copied after them."""
        del nbytes
        return out + own[len(out) :], ()

    def leave(self, drain: Callable[[], None]) -> None:
        """Wait for the GPUs of this process, and free the memory."""
        drain()
        self._arena.close()


class Ranks(Processes):
    """This process has one GPU, which is number `rank` of `world`. Methods are collective.

    Raises: what `exchange` raises. After that nobody knows what others do: what is shared stays.
    """

    def __init__(self, rank: int, world: int, exchange: Exchange) -> None:
        if not 1 <= world <= MAX_GPUS or not 0 <= rank < world:
            rule = f"rank must be below world, and world at most {MAX_GPUS}"
            raise UsageError(f"{rule}, got rank {rank} of {world}")
        super().__init__((rank,))
        self._rank, self._world, self._exchange = rank, world, exchange
        self._about = f"kernel {kernel_hash()} on {world} ranks"
        self._lost = False
        self._plans: dict[int, Plan] = {}
        self._mapped: list[int] = []
        self._blocks = 0  # that pieces were made of
        self._pieces: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)  # by size

    def gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        try:
            value = json.dumps(make())
        except BaseException as error:
            self._talk(what, "", error)
            raise
        heard = self._talk(what, value, None)
        for said in heard:
            if said["at"] != heard[0]["at"]:
                where = f"rank 0 at {heard[0]['at']}, rank {said['rank']} at {said['at']}"
                raise UsageError(f"ranks do not make the same calls: {where}")
            if said["error"]:
                kind = UsageError if said["misuse"] else DeviceError
                raise kind(f"rank {said['rank']}: {said['error']}")
        return [json.loads(said["value"]) for said in heard]

    def _talk(self, what: str, value: str, error: BaseException | None) -> list[dict[str, Any]]:
        said = {"rank": self._rank, "at": f"{what} ({self._about})", "value": value}
        said["error"] = f"{type(error).__name__}: {error}" if error else ""
        said["misuse"] = isinstance(error, UsageError)
        lost, self._lost = self._lost, True  # unless all is well
        answers = self._exchange(json.dumps(said).encode())
        heard = []
        with suppress(TypeError, ValueError):
            heard = [dict(json.loads(bytes(one))) for one in answers]
        if [one.get("rank") for one in heard] != list(range(self._world)):
            rule = f"what each of {self._world} ranks gave, in their order"
            raise UsageError(f"exchange must return {rule}: got {answers!r:.80}")
        places = {one["at"] for one in heard}
        leaving = any(place.startswith(_CLOSING) for place in places)
        self._lost = lost or (leaving and len(places) > 1)
        return heard

    def choice(self, own: Choice | None) -> Choice | None:
        """The choice of rank 0. It comes with a name for the object that is made, so that two
        objects cannot meet."""

        def said() -> Any:
            mine = asdict(own) | {"config": own.config.canonical()} if own else None
            return None if self._rank else (uuid.uuid4().hex[:8], mine)

        name, first = self.gather("the choice", said)[0]
        self._about += f", object {name}"
        if not first:
            return None
        interval = first["interval_us"] and tuple(first["interval_us"])
        return Choice(**first | {"config": parse_config(first["config"]), "interval_us": interval})

    def plan(self, m: int, of: Callable[[int], Plan]) -> Plan:
        if m not in self._plans:

            def said() -> Any:
                plan = None if self._rank else of(m)
                return plan and (plan.config.canonical(), plan.source, plan.note)

            text, source, note = self.gather(f"a plan for {m} tokens", said)[0]
            config = parse_config(text)
            assert isinstance(config, Config)
            self._plans[m] = Plan(config=config, source=source, note=note)
        return self._plans[m]

    def connect(self, gpus: Gpus) -> None:
        """See that ranks have different GPUs, which reach each other, by real writes."""
        super().connect(gpus)
        uuids = self.gather("connecting", lambda: gpus.devices[0].uuid)
        for rank, own in enumerate(uuids):
            if (other := uuids.index(own)) != rank:
                raise DeviceError(f"ranks {other} and {rank} use the same GPU ({own})")
        words = self.zeros(self._arena, PROBE_BYTES * self._world)
        self.gather("probing", lambda: self._probe(words))
        self.gather("probed", lambda: self._require_probes(words[self._rank]))

    def _probe(self, words: Sequence[int]) -> None:
        for word in words:
            to, pattern = word + PROBE_BYTES * self._rank, np.uint32(_PROBE_PATTERN + self._rank)
            self._gpus.support("probe_write", 0, 1, 1, to, pattern)
        self._gpus.wait(0)

    def _require_probes(self, own: int) -> None:
        for rank, seen in enumerate(self._gpus.download(0, own, (self._world,), np.uint32)):
            if seen != _PROBE_PATTERN + rank:
                raise DeviceError(f"what rank {rank} writes to rank {self._rank} does not arrive")

    def memory(self, what: str, sizes: Sequence[int]) -> tuple[int, ...]:
        pointers = [0] * self._world

        def export() -> Any:
            if not (size := sizes[self._rank]):
                return None
            pointer = self._arena.alloc(0, -(-size // BLOCK_BYTES) * BLOCK_BYTES)
            pointers[self._rank] = pointer
            self._gpus.use(0)
            handle = check(driver.cuIpcGetMemHandle(pointer))
            base, _ = check(driver.cuMemGetAddressRange(pointer))
            handle = ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE)
            return handle.hex(), pointer - int(base)

        exported = self.gather(what, export)

        def map_all() -> None:
            for rank, found in enumerate(exported):
                if found and rank != self._rank:
                    pointers[rank] = self._map(rank, bytes.fromhex(found[0])) + found[1]

        self.gather(f"{what}, mapped", map_all)
        return tuple(pointers)

    def _map(self, rank: int, handle: bytes) -> int:
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, len(handle))
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self._gpus.use(0)
        try:
            pointer = int(check(driver.cuIpcOpenMemHandle(opened, flags)))
        except DeviceError as error:
            rule = "ranks need GPUs with peer access in one machine, containers one IPC namespace"
            raise DeviceError(f"no way to the memory of rank {rank}: {rule} ({error})") from error
        self._mapped.append(pointer)
        return pointer

    def zeros(self, arena: Arena, nbytes: int) -> tuple[int, ...]:
        size = max(_PIECE_BYTES, 1 << (nbytes - 1).bit_length())
        free = self._pieces[size]
        if not free:
            whole, self._blocks = max(BLOCK_BYTES, size), self._blocks + 1
            block = self.memory("flags", [whole] * self._world)
            for at in range(0, whole, size):
                free.append((f"{self._blocks} + {at}", tuple(p + at for p in block)))
        name, piece = free.pop()
        arena.on_close(lambda: free.append((name, piece)))

        def zero() -> None:
            self._gpus.fill(0, piece[self._rank], 0, size)
            self._gpus.wait(0)

        self.gather(f"flags {name}, zeroed", zero)
        return piece

    def ends(self, out: tuple[int, ...], own: tuple[int, ...], nbytes: int) -> Ends:
        """Peers store only into memory that is shared: `out` gets a copy."""
        return own, tuple(Copy(to, own[self._rank], nbytes) for to in out)

    def leave(self, drain: Callable[[], None]) -> None:
        """Free what is shared when nobody uses it any more, nor has it mapped."""
        if not self._lost:
            try:
                self.gather(_CLOSING, drain)
            except CtatuneError as error:
                if not self._lost:
                    raise
                warnings.warn(f"memory that ranks share is not freed: {error}", stacklevel=2)
        if self._lost:
            drain()
        self._gpus.use(0)
        while self._mapped:
            check(driver.cuIpcCloseMemHandle(self._mapped.pop()))
        if not self._lost:
            self.gather("closed", lambda: None)
            self._arena.close()
