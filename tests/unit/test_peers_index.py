"""Where users of other systems got hurt, by number: the router's map of who holds which block."""

from __future__ import annotations

from common.clock import MockClock
from common.hashing import hash_blocks, root_hash
from router.index import PrefixIndex


def chain(first: int, blocks: int = 8, salt: str = "") -> list[bytes]:
    """The block hashes of some prompt."""
    return hash_blocks(root_hash("model", cache_salt=salt), list(range(first, first + 16 * blocks)))


def test_peers_08_nothing_of_a_dead_incarnation_is_ever_found_again() -> None:
    """A node that restarts under its name is another incarnation; a late message of the old one changes nothing."""
    clock = MockClock()
    index = PrefixIndex(clock=clock)
    index.stored("node-a/1", chain(0))
    index.stored("node-b/1", chain(0, 3))
    index.expect("node-a/1", chain(0, 12))
    index.drop("node-a/1")
    assert index.match(chain(0, 12)) == {"node-b/1": 3}
    index.stored("node-a/2", chain(500))
    index.removed("node-a/1", chain(0))
    assert index.match(chain(0)) == {"node-b/1": 3}
    assert index.match(chain(500)) == {"node-a/2": 8}


def test_peers_14_the_index_has_a_bound_and_keeps_what_is_new() -> None:
    index = PrefixIndex(1000, clock=MockClock())
    for prompt in range(400):
        index.stored("a", chain(10_000 * prompt))
        assert len(index) <= 1000
    assert index.match(chain(10_000 * 399)) == {"a": 8}
    assert index.match(chain(0)) == {}


def test_peers_21_one_tenants_blocks_are_not_anothers_hits() -> None:
    index = PrefixIndex(clock=MockClock())
    index.stored("a", chain(0, salt="tenant"))
    assert index.match(chain(0, salt="other")) == index.match(chain(0)) == {}
    assert index.match(chain(0, salt="tenant")) == {"a": 8}
