"""One copy of the bytes of an item in one process, one thread: the roof of `transport`."""

import ctypes
import sys

import torch

from benchmarks.item import COUNTS, WARM_UPS, item_bytes
from benchmarks.report import rate, report

COLD = 192 * 2**20  # bytes of the sources, and of the targets: several times the last cache


def main(size: str) -> None:
    torch.set_num_threads(1)
    nbytes = item_bytes(size)
    for name, count in ((f"memcpy_{size}", max(2, COLD // nbytes)), (f"memcpy_warm_{size}", 2)):
        if name == "memcpy_warm_58mb":
            continue  # no cache holds it
        stride = -(-nbytes // 64) * 64
        block = torch.ones((2, count, stride), dtype=torch.uint8)  # as our sources: NumPy would ask for huge pages
        sources, targets = ([block[side, k, :nbytes] for k in range(count)] for side in (0, 1))
        pairs = [(target.data_ptr(), source.data_ptr()) for target, source in zip(targets, sources, strict=True)]

        def memmove(number, pairs=pairs):
            target, source = pairs[number % len(pairs)]
            ctypes.memmove(target, source, nbytes)

        def copy(number, targets=targets, sources=sources):
            at = number % len(sources)
            targets[at].copy_(sources[at])

        speeds = {
            call: rate(step, COUNTS[size], WARM_UPS[size])
            for call, step in (("ctypes.memmove", memmove), ("Tensor.copy_", copy))
        }
        best = max(speeds, key=lambda call: speeds[call])
        report(name, speeds[best], f"torch {torch.__version__}", call=best, bytes=nbytes, buffers=count, threads=1)


if __name__ == "__main__":
    main(sys.argv[1])
