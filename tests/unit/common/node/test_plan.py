"""What a node is before its model is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.oracle import make_tiny

from common.base.errors import BadRequest, ConfigError
from common.base.hashing import root_hash
from common.config.service_configs import DecodeConfig
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.sequence import Sequence
from common.kv.spec import KVSpec
from common.node.parts import make_pool, make_scheduler
from common.node.plan import fit_memory, plan_node

GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


@pytest.mark.parametrize("node_id", ["decode-0", "d", "kvrelay_decode.1", f"decode-{'h' * 64}-8000", "fd00::7"])
def test_node_id_of_host_and_container_names_is_taken(node_id: str) -> None:
    assert DecodeConfig(node_id=node_id).node_id == node_id


@pytest.mark.parametrize("node_id", ["../../tmp/evil", "a b", "-x", "..", "d\n", "é", "x" * 129, ""])
def test_node_id_that_is_no_name_is_refused_before_anything_is_imported(node_id: str) -> None:
    with pytest.raises(ConfigError, match="node_id must be at most 128 characters"):
        DecodeConfig(node_id=node_id)


@pytest.mark.parametrize(("sizes", "longest"), [((1, 1), 160), ((2, 1), 320), ((4, 1), 640), ((4, 3), 192)])
def test_a_context_may_be_as_many_times_as_long_as_ranks_share_it(
    sizes: tuple[int, int], longest: int, tmp_path: Path
) -> None:
    """Each rank has memory for 10 blocks of 16 tokens, in which every block table needs its own."""
    stripes, tables = sizes
    plan = plan_node(DecodeConfig(model=str(make_tiny("llama", tmp_path)), decode_context_parallel=stripes))
    group = plan.layout.spec.groups[0]
    own = [replace(group, layers=(i,), window=4, table=i) for i in range(tables)]
    plan = replace(plan, layout=replace(plan.layout, spec=KVSpec(tuple(own)), pp_layers=()))
    num_blocks = plan.layout.pool_blocks(10)
    fitted = fit_memory(plan, num_blocks)
    assert plan.world_size == stripes
    assert fitted.model.max_model_len == longest
    scheduler = make_scheduler(fitted, make_pool(fitted, num_blocks))
    assert scheduler.allocator.longest * 16 == longest
    fits, too_long = (
        Sequence(AttemptKey("r", n), EngineRequest(pack_ids([1] * n), GREEDY), [1] * n, root_hash("m"), 0.0)
        for n in (longest - 1, longest)
    )
    scheduler.check_fits(fits)
    scheduler.add(fits)
    assert scheduler.schedule() is not None
    with pytest.raises(BadRequest):
        scheduler.check_fits(too_long)
