from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from kvrelay.up.on_ray.placement import Placement, RayHost, place, why_pending

SMALL = [RayHost(f"n{number}", f"10.0.0.{number}", {"CPU": 4.0}) for number in range(3)]
GPUS = [RayHost(f"g{number}", f"10.0.1.{number}", {"CPU": 64.0, "GPU": 8.0}) for number in range(2)]


@pytest.mark.parametrize(
    ("ranks", "of_rank", "hosts", "expected"),
    [
        (1, {"CPU": 1.0}, SMALL, Placement(({"CPU": 1.0},), "STRICT_PACK")),
        (4, {"CPU": 1.0}, SMALL, Placement(({"CPU": 4.0},), "STRICT_PACK")),
        (6, {"CPU": 1.0}, SMALL, Placement(({"CPU": 3.0},) * 2, "STRICT_SPREAD")),
        (12, {"CPU": 1.0}, SMALL, Placement(({"CPU": 4.0},) * 3, "STRICT_SPREAD")),
        (8, {"CPU": 1.0, "GPU": 1.0}, GPUS, Placement(({"CPU": 8.0, "GPU": 8.0},), "STRICT_PACK")),
        (16, {"CPU": 1.0, "GPU": 1.0}, [*SMALL, *GPUS], Placement(({"CPU": 8.0, "GPU": 8.0},) * 2, "STRICT_SPREAD")),
    ],
)
def test_one_host_if_any_can_hold_all_ranks_else_equal_shares(
    ranks: int, of_rank: dict[str, float], hosts: list[RayHost], expected: Placement
) -> None:
    assert place("decode-0", ranks, of_rank, hosts) == expected


@pytest.mark.parametrize(
    ("ranks", "of_rank", "hosts", "sentence"),
    [
        (1, {"CPU": 5.0}, SMALL, "decode-0 needs 5 CPU for each of its 1 rank"),
        (13, {"CPU": 1.0}, SMALL, "the Ray cluster has 10.0.0.0 with 4 CPU; 10.0.0.1 with 4 CPU; 10.0.0.2 with 4 CPU"),
        (1, {"CPU": 1.0, "GPU": 1.0}, SMALL, "needs 1 CPU and 1 GPU for each"),
        (1, {"CPU": 1.0}, [], "has no host that is alive"),
    ],
)
def test_what_no_host_can_hold_is_named(
    ranks: int, of_rank: dict[str, float], hosts: list[RayHost], sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        place("decode-0", ranks, of_rank, hosts)
    assert sentence in raised.value.message


def test_a_pending_group_names_what_is_free() -> None:
    placement = Placement(({"CPU": 2.0},) * 2, "STRICT_SPREAD")
    assert why_pending("prefill-1", placement, SMALL[:2], {"n0": {"CPU": 1.0}}) == (
        "prefill-1 needs 2 CPU on each of 2 hosts; free: 10.0.0.0 1 CPU; 10.0.0.1 0 CPU"
    )
