from __future__ import annotations

import json

from common.tools.up.console import banner


def test_the_banner_names_addresses_processes_and_kernels() -> None:
    rows = [("router-0", 1, "http://a"), ("prefill-0", 22, "tcp://b")]
    text = banner(["http://a"], "demo", rows, ["PyTorch (no C++ compiler found)", "native avx2, 2 threads"], False, 1.0)
    assert "kvrelay is ready at http://a (after 1.0 s), serving the model demo" in text
    assert "  prefill-0  pid 22  tcp://b" in text
    assert "Kernels: PyTorch (no C++ compiler found); native avx2, 2 threads" in text


def test_the_line_to_try_asks_greedily_and_is_json() -> None:
    text = banner(["http://a"], "demo", [("router-0", 21, "http://a")], [], False, 1.0)
    request = json.loads(text.split("-d '")[1].split("'\n")[0])
    assert request["model"] == "demo"
    assert request["temperature"] == 0
