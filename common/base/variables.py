"""Environment variables that set no option of a service."""

CACHE = "KVRELAY_CACHE"
"""The cache folder, an absolute path: `common.base.cache_folder`."""
CPU_KERNELS = "KVRELAY_CPU_KERNELS"
""""torch" for PyTorch's operations instead of native kernels, or the most that native kernels may use of the processor:
avx512bf16, avx512, avx2, neonbf16, portable."""
STRICT_STATES = "KVRELAY_STRICT_STATES"
"""Set by tests: an event that a state machine's table does not have raises (`common.base.transitions`)."""
