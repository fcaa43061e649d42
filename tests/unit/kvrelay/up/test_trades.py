from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.up.trades import Trades

NODES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


def test_nothing_changes_until_other_numbers_are_wanted() -> None:
    trades = Trades(NODES)
    assert trades.wanted == {"prefill": 2, "decode": 2, "total": 4}
    assert trades.next() is None


def test_the_node_that_changed_least_recently_changes_first() -> None:
    trades = Trades(NODES)
    trades.observe({"prefill-0": "decode"}, 10.0)
    trades.observe({"decode-1": "prefill"}, 20.0)
    trades.wanted = {"prefill": 1, "decode": 3, "total": 4}
    assert trades.next() == "prefill-1"
    trades.wanted = {"prefill": 3, "decode": 1, "total": 4}
    assert trades.next() == "decode-0"
    trades.observe({"decode-0": "prefill"}, 30.0)
    assert trades.next() is None


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=12))
def test_no_node_changes_twice_between_two_changes_of_direction(
    prefill: int, decode: int, turns: list[tuple[bool, int]]
) -> None:
    """The planner lets ten minutes pass between changes in opposite directions."""
    roles = {f"prefill-{i}": "prefill" for i in range(prefill)} | {f"decode-{i}": "decode" for i in range(decode)}
    trades, total, now_s, last = Trades(roles), prefill + decode, 0.0, dict[str, float]()
    for to_prefill, moves in turns:
        have = trades.counts()["prefill"]
        want = min(total - 1, have + moves) if to_prefill else max(1, have - moves)
        trades.wanted = {"prefill": want, "decode": total - want, "total": total}
        now_s += 600.0
        while (name := trades.next()) is not None:
            assert now_s - last.get(name, -600.0) >= 600.0
            last[name] = now_s
            trades.observe({name: "decode" if trades.roles[name] == "prefill" else "prefill"}, now_s)
        assert trades.counts() == trades.wanted
