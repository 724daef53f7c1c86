"""Names of the resources and drivers that are GPUs. Pure."""

from __future__ import annotations

GPU = "nvidia.com/gpu"
SHARED_GPU = "nvidia.com/gpu.shared"
"""The name that NVIDIA's device plugin gives to GPUs shared by time, where it is told to rename them."""
MIG_PREFIX = "nvidia.com/mig-"
DRIVER_PREFIX = "gpu."
"""Names of DRA drivers of GPUs begin with it, those of all vendors (`gpu.nvidia.com`)."""


def is_gpu_resource(resource: str) -> bool:
    """Whether units of a resource are GPUs, or parts of one."""
    return resource in (GPU, SHARED_GPU) or resource.startswith(MIG_PREFIX)


def is_gpu_driver(driver: str) -> bool:
    """Whether the devices of a DRA driver are GPUs."""
    return driver.startswith(DRIVER_PREFIX)
