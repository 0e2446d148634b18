"""How long a look-up takes: `import ctatune`, the first answer, and a million more.

python benchmarks/lookup.py [SHAPE GPUS]
"""

import sys
import time

CALLS = 1_000_000


def main() -> None:
    shape, gpus = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else ("4096x8192x8192", 2)
    now = time.perf_counter_ns
    begin = now()
    import ctatune

    imported = now()
    ctatune.best(shape, gpus=gpus)
    answered = now()
    took = []
    for _ in range(CALLS):
        start = now()
        ctatune.best(shape, gpus=gpus)
        took.append(now() - start)
    took.sort()
    print(f"import {(imported - begin) / 1e6:.1f} ms")
    print(f"first answer {(answered - imported) / 1e6:.1f} ms")
    for name, part in (("median", 0.5), ("99.9th percentile", 0.999), ("slowest", 1.0)):
        print(f"{name} of {CALLS:,}: {took[min(CALLS - 1, int(part * CALLS))] / 1e3:.2f} us")


if __name__ == "__main__":
    main()
