"""Whether another version of `kernels/mlp.cu` compiles to the same machine code as the present one.

    git show COMMIT:kernels/mlp.cu > /tmp/old.cu; python benchmarks/same_code.py /tmp/old.cu

Compares each family that both versions have, along n and along h, and swapped tiles of 200 tokens.
Ten minutes on two cores; needs no GPU.
"""

import os
import struct
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from ctatune import jit
from ctatune.config import Config
from ctatune.limits import why_invalid
from ctatune.problem import Problem
from ctatune.space import FAMILIES, swapped

COMPARED = (".text.", ".nv.constant0.")  # instructions, and the layout of parameters
NO_BYTES = 8  # type of a section that takes none in the file
PROBLEM = Problem(m=4096, k=4096, h=8192, n=4096, gpus=2)


def sections(cubin: bytes) -> dict[str, bytes]:
    """What runs, of an ELF file of 64 bits, by the names of its sections."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = cubin[headers[names_at][4] :]
    found = {}
    for name_at, kind, _, _, offset, length in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        if name.startswith(COMPARED) and kind != NO_BYTES:
            found[name] = cubin[offset : offset + length]
    return found


def compared(config: Config, other: str) -> str:
    """ "same", "differs", or that the other version has no such config."""
    if config.swap_ab and "kSwap" not in other:
        return "new"
    constants = jit.preamble(config)
    ours = sections(jit.cubin("mlp", constants))
    try:
        theirs = sections(jit._compile("mlp", constants + other))
    except jit.CompileError:
        return "new"
    return "same" if ours == theirs else "differs"


def main() -> None:
    other = Path(sys.argv[1]).read_text(encoding="utf-8")
    configs = [f.config(up_group=2, down_group=2, down_axis=a) for f in FAMILIES for a in "nh"]
    configs = [config for config in configs if why_invalid(config, PROBLEM) is None]
    configs += swapped(replace(PROBLEM, m=200))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compared, configs, [other] * len(configs)))
    for config, result in zip(configs, results, strict=True):
        if result == "differs":
            print(f"differs: {config}")
    print(f"{len(results)} configs: {results.count('same')} the same, {results.count('new')} new")
    sys.exit("differs" in results or "same" not in results)


if __name__ == "__main__":
    main()
