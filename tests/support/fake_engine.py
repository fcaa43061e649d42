"""A model and a transport without tensors, for tests of scheduling and of the two nodes' cores.

Each KV slot of the fake model holds the identity of the whole prefix up to its token and of the block table that it was
written for, so a step that reads a wrong, stale or overwritten slot is detected at once: every slot that a row sees through
its table's window. The next token is a function of that prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from common.base.hashing import BLOCK_SIZE
from common.control.messages import AttemptKey, Grant, PromptLogprobs
from common.engine.kv_transfer import (
    DestinationReleased,
    OnTransferEvent,
    Received,
    SourceReleased,
    TransferPlan,
)
from common.engine.scheduled_step import ScheduledStep
from common.engine.sequence_state import END_IGNORED
from common.engine.step import SampledToken, StepInput, StepOutput

VOCAB = 1000


def wasted_rows(scheduled: ScheduledStep) -> int:
    """Rows that a step, just before its `Scheduler.update`, computed for sequences that have ended."""
    rows = zip(scheduled.seqs, scheduled.step.query_lens, strict=True)
    return sum(count for seq, count in rows if seq.state in END_IGNORED)


def prefix_identity(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=12).digest()


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model's greedy choice after `token_ids`."""
    return int.from_bytes(prefix_identity(token_ids)[:4], "little") % VOCAB


def generate(token_ids: Sequence[int], count: int, stop: Sequence[int] = (), min_tokens: int = 0) -> list[int]:
    """The expected answer to a request for `count` tokens; shorter if one of `stop` occurs after `min_tokens`."""
    tokens = list(token_ids)
    for index in range(count):
        tokens.append(choose(tokens, stop if index < min_tokens else ()))
        if tokens[-1] in stop:
            break
    return tokens[len(token_ids) :]


def choose(token_ids: Sequence[int], banned: Sequence[int], mask: bytes | None = None) -> int:
    """The fake model's choice among the tokens that are allowed."""
    token = next_token(token_ids)
    while token in banned or (mask is not None and not (token // 8 < len(mask) and mask[token // 8] >> token % 8 & 1)):
        token = (token + 1) % VOCAB
    return token


def prompt_logprobs(before: Sequence[int], token: int) -> PromptLogprobs:
    """The fake model's log-probabilities of the prompt token that follows `before`."""
    return PromptLogprobs(-next_token(before) / VOCAB, 1 + token, [next_token(before)], [0.0])


def scored_prompt(prompt: Sequence[int]) -> list[PromptLogprobs]:
    """Log-probabilities of every prompt token after the first."""
    return [prompt_logprobs(prompt[:i], prompt[i]) for i in range(1, len(prompt))]


def slot_of(blocks: list[int], position: int) -> int:
    """The KV slot of a position in a sequence's blocks."""
    return blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


class Computed:
    """The result of a step that completes at once."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepOutput:
        return self._output


class FakeRunner:
    """Runs steps on slots of prefix identities, and checks every slot that it reads."""

    def __init__(self, num_blocks: int, windows: Sequence[int | None] = (None,)) -> None:
        self.windows = windows
        self.slots: list[tuple[int, bytes, tuple[int, ...]] | None] = [None] * (num_blocks * BLOCK_SIZE)
        """(block table, identity of the prefix, its tokens)"""
        self.fail_next: Exception | None = None
        self.steps = 0
        self._drawn: dict[int, list[int]] = {}
        """Tokens that each step drew, for placeholders of the next step."""

    def launch(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> Computed:
        return Computed(self.execute(step, on_layer))

    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.steps += 1
        for copy in step.copies:
            for offset in range(BLOCK_SIZE):
                self.slots[copy.target * BLOCK_SIZE + offset] = self.slots[copy.source * BLOCK_SIZE + offset]
        token_ids = list(step.token_ids)
        for row, sample in step.placeholders:
            token_ids[row] = self._drawn[step.placeholder_step][sample]
        sequences, row = [], 0
        for index, (query_len, context_len) in enumerate(zip(step.query_lens, step.context_lens, strict=True)):
            cached = context_len - query_len
            tables = [table[index] for table in step.block_tables]
            [before] = {self._tokens(number, blocks, cached) for number, blocks in enumerate(tables)}
            tokens = before + tuple(token_ids[row : row + query_len])
            assert step.positions[row : row + query_len] == list(range(cached, context_len))
            for number, blocks in enumerate(tables):
                self.write(number, blocks, tokens, cached)
                slots = step.slot_mapping[number][row : row + query_len]
                assert slots == [slot_of(blocks, position) for position in range(cached, context_len)]
            sequences.append(tokens)
            row += query_len
        if on_layer is not None:
            on_layer(0)
        sampled = []
        for spec in step.samples:
            assert spec.position == step.positions[spec.row] + 1
            tokens, params = sequences[spec.seq_index][: spec.position], spec.params
            banned = params.stop_token_ids if spec.num_generated < params.min_tokens else ()
            sampled.append(SampledToken(choose(tokens, banned, spec.mask)))
        self._drawn[step.step_id] = [token.token_id for token in sampled]
        scored = [
            [
                prompt_logprobs(sequences[rows.seq_index][: step.positions[rows.row + i] + 1], token)
                for i, token in enumerate(rows.token_ids)
            ]
            for rows in step.scored
        ]
        return StepOutput(step.step_id, sampled, 0.0, scored)

    def write(self, table: int, blocks: list[int], tokens: Sequence[int], start: int) -> None:
        """The KV of `tokens` from position `start` on, in the blocks of one table."""
        for position in range(start, len(tokens)):
            prefix = tuple(tokens[: position + 1])
            self.slots[slot_of(blocks, position)] = (table, prefix_identity(prefix), prefix)

    def _tokens(self, table: int, blocks: list[int], count: int) -> tuple[int, ...]:
        """The tokens before position `count`; asserts that the slots which its row sees hold their KV."""
        window = self.windows[table]
        start = 0 if window is None else max(0, count - window + 1)
        if count == 0:
            return ()
        last = self.slots[slot_of(blocks, count - 1)]
        assert last is not None, "a step reads KV that was never written"
        tokens = last[2]
        assert len(tokens) == count, "a step reads KV of another position"
        for position in range(start, count):
            here = self.slots[slot_of(blocks, position)]
            assert here is not None
            assert here[0] == table, "a step reads KV of other layers"
            assert here[1] == prefix_identity(tokens[: position + 1]), "a step reads KV of another sequence"
        return tokens


class FakeWire:
    """Both ends of a transport between two `FakeRunner`s. Blocks move only when `pump` is called."""

    def __init__(self, source: FakeRunner, destination: FakeRunner) -> None:
        self.source, self.destination = source, destination
        self.on_sender_event: OnTransferEvent
        self.on_receiver_event: OnTransferEvent
        self.outgoing: dict[AttemptKey, TransferPlan] = {}
        self.final: dict[AttemptKey, int] = {}
        self.grants: dict[AttemptKey, Grant] = {}
        self.incoming: dict[AttemptKey, TransferPlan] = {}
        self.sent: dict[AttemptKey, int] = {}
        self.blocks_moved = 0
        self.disconnected: list[str] = []
        self.sender = _FakeSender(self)
        self.receiver = _FakeReceiver(self)

    def pump(self) -> bool:
        """Move one block of one transfer, if any can be moved."""
        for key, grant in list(self.grants.items()):
            transfer = self.outgoing[key]
            index = self.sent.setdefault(key, min(grant.first_blocks))
            if index < min(self.final.get(key, 0), len(transfer.block_hashes)):
                incoming = self.incoming.get(key)
                if incoming is not None:
                    for table, first in enumerate(grant.first_blocks):
                        assert first >= transfer.first_blocks[table], "asked for KV that the sender has given up"
                        if index >= first:
                            self._copy(transfer.blocks[table][index], incoming.blocks[table][index])
                            self.blocks_moved += 1
                self.sent[key] += 1
                return True
            if index == len(transfer.block_hashes):
                self._end_source(key, None)
                if key in self.incoming:
                    del self.incoming[key]
                    self.on_receiver_event(Received(key, 1))
                    self.on_receiver_event(DestinationReleased(key))
                return True
        return False

    def _copy(self, src: int, dst: int) -> None:
        for offset in range(BLOCK_SIZE):
            self.destination.slots[dst * BLOCK_SIZE + offset] = self.source.slots[src * BLOCK_SIZE + offset]

    def _end_source(self, key: AttemptKey, error: Exception | None) -> None:
        del self.outgoing[key]
        self.grants.pop(key, None)
        self.on_sender_event(SourceReleased(key, 1, error))


class _FakeSender:
    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire

    def open_source(self, plan: TransferPlan, final_blocks: int = 0) -> None:
        self.wire.outgoing[plan.key] = plan
        self.wire.final[plan.key] = final_blocks

    def grant(self, grant: Grant) -> None:
        if grant.key in self.wire.outgoing:
            self.wire.grants[grant.key] = grant

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        self.wire.final[key] = num_blocks

    def abort(self, key: AttemptKey) -> None:
        if key in self.wire.outgoing:
            self.wire._end_source(key, None)

    def disconnect(self, incarnation: str) -> None:
        self.wire.disconnected.append(incarnation)

    def close(self) -> None:
        for key in list(self.wire.outgoing):
            self.abort(key)


class _FakeReceiver:
    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire

    def open_destination(self, plan: TransferPlan, *_: Any, timeline: bool = False) -> bool:
        self.wire.incoming[plan.key] = plan
        return True

    def abort(self, key: AttemptKey) -> None:
        if self.wire.incoming.pop(key, None) is not None:
            self.wire.on_receiver_event(DestinationReleased(key))

    def close(self) -> None:
        for key in list(self.wire.incoming):
            self.abort(key)
