"""What a device can do, asked of torch where people's machines differ."""

import torch


def has_bf16(device: torch.device) -> bool:
    """Whether it multiplies matrices in bf16 faster than in fp32. CUDA before compute capability 8 only emulates that, ROCm's cards have it."""
    if device.type != "cuda":
        return False
    # of this device: torch.cuda.is_bf16_supported asks the current one, of maybe several, and says yes where it is emulated
    return torch.version.hip is not None or torch.cuda.get_device_properties(device).major >= 8


def is_on_host(device: torch.device) -> bool:
    """Whether its memory is the host's: a CPU, an Apple GPU, and a GPU of CUDA or ROCm that is integrated (Jetson, GB10, APUs)."""
    return device.type != "cuda" or bool(torch.cuda.get_device_properties(device).is_integrated)
