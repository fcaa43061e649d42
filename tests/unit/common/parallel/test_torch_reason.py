"""What operators read of failures in torch.distributed."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from common.base.errors import ConfigError
from common.parallel.gloo import make_group
from common.parallel.torch_reason import torch_reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61107. This is "
            "typically caused by a remote worker crashing. Check the logs.",
            "Connection closed by peer [127.0.0.1]:61107",
        ),
        ("[/build/gloo/pair.cc:1] ", "[/build/gloo/pair.cc:1] "),
        ("wait timeout after 1000ms, keys: /0/1\nframes", "wait timeout after 1000ms, keys: /0/1"),
    ],
)
def test_the_place_in_pytorchs_sources_is_left_out(message: str, reason: str) -> None:
    assert torch_reason(RuntimeError(message)) == reason


def test_an_interface_that_is_not_there_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match=r"interface 'nowhere0': Unable to find address for: nowhere0$"):
        make_group(HashStore(), 0, [0, 1], "nowhere0", 1.0)
