from __future__ import annotations

from common.tools.up.console import banner


def test_the_banner_names_addresses_processes_and_kernels() -> None:
    rows = [("router-0", 1, "http://a"), ("prefill-0", 22, "tcp://b")]
    text = banner(["http://a"], "demo", rows, ["PyTorch (no C++ compiler found)", "native avx2, 2 threads"], False, 1.0)
    assert "kvrelay is ready at http://a (after 1.0 s), serving the model demo" in text
    assert "  prefill-0  pid 22  tcp://b" in text
    assert "Kernels: PyTorch (no C++ compiler found); native avx2, 2 threads" in text
