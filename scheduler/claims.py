"""What a row of a step claims: tokens of the step's room, and blocks of the pool.

The parts that serving running requests (plan.py) and admission (admit.py) have in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.waiting import Queued

if TYPE_CHECKING:
    from pagedraft.decoding.sequence import Sequence


class Schedulable(Queued, Protocol):
    """What the plan reads of a request, and the two things it changes.

    It appends to and clears ``sequence.block_ids`` and calls ``drop_kv``.
    """

    @property
    def sequence(self) -> Sequence: ...  # token_ids, num_written, block_ids
    @property
    def num_drafts(self) -> int: ...  # drafts wanted this step, >= 0
    @property
    def parent(self) -> Schedulable | None: ...  # never starts in one step with its forks
    def drop_kv(self) -> None: ...  # num_written = 0; the tokens stay


RequestT = TypeVar("RequestT", bound=Schedulable)
_RequestT = TypeVar("_RequestT", bound=Schedulable, contravariant=True)


class PrefixSource(Protocol[_RequestT]):
    """Gives a waiting request the blocks that others have computed (scheduler/prefix.py)."""

    def is_ready(self, request: _RequestT, /) -> bool: ...  # False: it waits for another to run
    def attach(self, request: _RequestT, /) -> None: ...  # sets block_ids and num_written
    def detach(self, request: _RequestT, /) -> None: ...  # gives back what attach gave, grants too
    def retire(self, request: _RequestT, /) -> None: ...  # preempts: takes blocks, calls drop_kv


@dataclass
class StepPlan(Generic[RequestT]):
    """``scheduled`` maps each row of the step, in order, to its span in tokens, drafts included.

    The caller moves ``admitted`` to running and ``preempted`` (already without blocks) to waiting.
    """

    scheduled: dict[RequestT, int] = field(default_factory=dict)
    admitted: list[RequestT] = field(default_factory=list)
    preempted: list[RequestT] = field(default_factory=list)


@dataclass
class Room:
    """Tokens that the step can still take: in all, of prompts, and at most of one prompt.

    held: prompt tokens that are kept for urgent requests, and are in neither count.
    """

    tokens: int
    prompt_tokens: int
    chunk: int
    held: int = 0

    def take(self, num_tokens: int) -> None:
        """Use prompt tokens."""
        self.tokens -= num_tokens
        self.prompt_tokens -= num_tokens

    def hold(self, num_tokens: int) -> None:
        """Keep as many of so many prompt tokens as there are."""
        self.held = min(num_tokens, self.tokens, self.prompt_tokens)
        self.take(self.held)

    def release(self) -> None:
        """Give back what was held."""
        self.take(-self.held)
        self.held = 0


def num_pending(request: Schedulable) -> int:
    sequence = request.sequence
    pending = len(sequence.token_ids) - sequence.num_written
    if pending < 1:
        raise ValueError(f"request {request.request_id!r}: expected pending tokens, got {pending}")
    return pending


def num_missing(request: Schedulable, span: int, pool: BlockPool) -> int:
    """Blocks that ``span`` more tokens need; below 1 if it has them."""
    sequence = request.sequence
    return pool.blocks_for(sequence.num_written + span) - len(sequence.block_ids)


def grant(request: Schedulable, span: int, pool: BlockPool) -> bool:
    """Append the blocks that ``span`` more tokens need; False, changing nothing, if too few."""
    sequence = request.sequence
    if sequence.num_written + span <= len(sequence.block_ids) * pool.block_size:
        return True
    missing = num_missing(request, span, pool)
    if missing > pool.num_free:
        return False
    sequence.block_ids.extend(pool.allocate(request.request_id, missing))
    return True


def add_drafts(
    plan: StepPlan[RequestT], request: RequestT, pool: BlockPool, room: Room, *, is_prompt: bool
) -> None:
    """Lengthen a span that reaches the last token by drafts, as room and free slots allow."""
    drafts = request.num_drafts
    left = min(room.tokens, room.prompt_tokens) if is_prompt else room.tokens
    if drafts > left:
        drafts = left
    span, sequence = plan.scheduled[request], request.sequence
    num_tokens = len(sequence.token_ids)
    if drafts == 0 or span < num_tokens - sequence.num_written:
        return
    if num_tokens + drafts > len(sequence.block_ids) * pool.block_size:
        num_slots = (len(sequence.block_ids) + pool.num_free) * pool.block_size
        drafts = min(drafts, num_slots - num_tokens)
        grant(request, span + drafts, pool)
    plan.scheduled[request] = span + drafts
    room.tokens -= drafts
    if is_prompt:
        room.prompt_tokens -= drafts


def preempt(
    request: RequestT, pool: BlockPool, prefixes: PrefixSource[RequestT] | None
) -> RequestT:
    """Take a running request's blocks; its tokens stay."""
    if prefixes is not None:
        prefixes.retire(request)
        return request
    block_ids = request.sequence.block_ids
    pool.free(request.request_id, block_ids)
    block_ids.clear()
    request.drop_kv()
    return request
