"""kernels/mlp.cu made for a config: compiled, loaded and ready to be launched."""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from ctatune import jit
from ctatune.abi import GROUP_THREADS, Argument
from ctatune.config import Config
from ctatune.gpus import Gpus, check
from ctatune.limits import math_groups, smem_bytes
from ctatune.records import KernelBuild


class Kernel:
    """The kernel of a valid config on every GPU; `ctas` of them run on each.

    `skip_wait` builds the negative control.
    """

    def __init__(self, gpus: Gpus, config: Config, *, skip_wait: bool = False) -> None:
        self._gpus = gpus
        self._threads = GROUP_THREADS * (1 + math_groups(config))
        self._smem_bytes = smem_bytes(config)
        cubin = jit.cubin("mlp", jit.preamble(config, skip_wait=skip_wait))
        (self._kernel,) = gpus.load(cubin, ["mlp"], smem_bytes=self._smem_bytes)
        self._function = driver.CUfunction(int(self._kernel.handle))
        self.ctas = config.ctas or self._resident_ctas(config.cluster)
        self._launches = [self._launch(self.ctas, int(own.handle)) for own in gpus.streams]

    def _resident_ctas(self, cluster: int) -> int:
        """CTAs that run at the same time: clusters that fit, since CTAs wait for each other."""
        if cluster == 1:
            return self._gpus.sm_count
        size = driver.CUlaunchAttribute()
        size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x = cluster
        size.value.clusterDim.y = size.value.clusterDim.z = 1
        launch = self._launch(cluster, 0)
        launch.attrs = [size]
        clusters = []
        for gpu in range(len(self._gpus)):
            self._gpus.use(gpu)
            clusters.append(int(check(driver.cuOccupancyMaxActiveClusters(self._function, launch))))
        return cluster * (min(clusters) // self._gpus.ranks)

    def _launch(self, ctas: int, stream: int, *, early: bool = True) -> driver.CUlaunchConfig:
        """A launch that, if `early`, begins while the kernel before it in the stream ends (it
        waits itself)."""
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = ctas, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = self._threads, 1, 1
        launch.sharedMemBytes = self._smem_bytes
        launch.hStream = stream
        if early:
            attribute = driver.CUlaunchAttribute()
            names = driver.CUlaunchAttributeID
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            launch.attrs, launch.numAttrs = [attribute], 1
        return launch

    def launch(self, gpu: int, argument: Argument) -> None:
        """Enqueue one launch on the stream of `gpu`; the driver copies the parameter block."""
        self._gpus.use(gpu)
        check(driver.cuLaunchKernelEx(self._launches[gpu], self._function, argument.address, 0))

    def launch_args(self, argument: Argument, stream: int, *, early: bool) -> tuple[Any, ...]:
        """What `cuLaunchKernelEx` takes to launch on a stream, in the context of its GPU;
        `argument` must outlive it."""
        return self._launch(self.ctas, stream, early=early), self._function, argument.address, 0

    def build(self) -> KernelBuild:
        """What the compiler made of the config."""
        attributes = self._kernel.attributes
        return KernelBuild(
            hash=jit.kernel_hash(),
            compiler=jit.compiler_versions(),
            registers=int(attributes.num_regs),
            local_bytes=int(attributes.local_size_bytes),
            smem_bytes=self._smem_bytes,
        )
