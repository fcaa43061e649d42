"""Names of the environment variables that set no option of a service."""

CACHE = "KVRELAY_CACHE"
"""Absolute path of the cache folder (`common.base.cache_folder`)."""
CPU_KERNELS = "KVRELAY_CPU_KERNELS"
"""Best instruction set that native kernels may use: avx512bf16, avx512, avx2, neonbf16 or portable; "torch" means PyTorch's
operations instead of native kernels."""
STRICT_STATES = "KVRELAY_STRICT_STATES"
"""Set by tests: an event that a state machine's table does not have raises (`common.base.transitions`)."""
