"""Parts of a node that are made from its plan: scheduler, what drafts tokens, grammars, its record in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from common.control.messages import NodeRecord, PeerRef, Role
from common.engine.draft_head import DraftHeadProposer, Run
from common.engine.draft_model import DraftModel
from common.engine.drafting import Drafting, IndexProposer
from common.engine.grammar.compiler import GrammarCompiled, GrammarCompiler
from common.engine.scheduler import Scheduler
from common.kv.pool import BlockPool
from common.node.adapter_table import AdapterSource
from common.node.plan import NodePlan
from common.security.sealed_endpoints import without_keys

if TYPE_CHECKING:
    from common.node.worker import Worker


def make_record(
    role: Role, me: PeerRef, plan: NodePlan, num_blocks: int, kernels: str, sources: Sequence[AdapterSource] = ()
) -> NodeRecord:
    """Make the node's record for Redis, without the keys of its data sockets, because every service can read it."""
    return NodeRecord(
        role,
        replace(me, data_addresses=[without_keys(address) for address in me.data_addresses]),
        plan.model,
        plan.layout,
        num_blocks // plan.layout.spec.num_tables,
        time.time(),
        max_num_seqs=plan.steps.max_num_seqs,
        kernels=kernels,
        adapters=[source.adapter for source in sources],
        adapter_paths={source.adapter.name: source.path for source in sources},
    )


def make_pool(plan: NodePlan, num_blocks: int) -> BlockPool:
    """Make the block pool of a node whose ranks together have `num_blocks` KV blocks."""
    return BlockPool(num_blocks, plan.layout.spec.num_tables, plan.layout.cp_size, plan.layout.dp_size)


def make_scheduler(plan: NodePlan, pool: BlockPool, draft: Worker | None = None, run: Run | None = None) -> Scheduler:
    """Make the scheduler of a node over its block pool. `draft`: its draft model. `run`: runs a step of its draft head; needed if
    it has one."""
    described, head = plan.model_config.draft_head, None
    if described is not None:
        assert run is not None
        head = DraftHeadProposer(
            described.method, run, lambda seq, num_slots: scheduler.allocator.reach(seq, num_slots)
        )
    scheduler = Scheduler(plan.steps, pool, plan.layout.spec.windows, make_drafting(plan, draft, head))
    return scheduler


def make_drafting(plan: NodePlan, draft: Worker | None = None, head: DraftHeadProposer | None = None) -> Drafting:
    """Make what drafts tokens on a node."""
    speculation = plan.speculation
    if speculation is None:
        return Drafting()
    if head is not None:
        return Drafting(head, speculation.max_drafts)
    if draft is not None:
        max_model_len, chunk = draft.plan.model.max_model_len, plan.steps.prefill_chunk
        model = DraftModel(draft.runner, draft.num_blocks, max_model_len=max_model_len, prompt_chunk=chunk)
        return Drafting(model, speculation.max_drafts)
    assert speculation.method in ("suffix", "ngram"), speculation.method
    return Drafting(IndexProposer(speculation.method, speculation.max_answer_tokens), speculation.max_drafts)


def make_grammars(plan: NodePlan, post: Callable[[GrammarCompiled], None]) -> GrammarCompiler:
    """Make the compiler of a node's grammars, which passes its events to `post` on any thread."""
    return GrammarCompiler(plan.tokenizer, plan.model.vocab_size, plan.model_config.eos_token_ids, post)
