"""Paged attention on CPU tensors: the exactness rules of the Triton kernel at a usable speed.

One gather brings the keys and values of a group of rows together, the query heads that share a KV
head are packed into the rows of one batched matmul, and every size that could change the bits of a
query is fixed: query rows are a multiple of 4, keys are cut at multiples of 256 that are added in
order, and widths are those for which trailing zeros change no bit (measured on MKL, AVX2; the tests
compare bits). A query's result therefore depends on its own position and keys only.

Rows are grouped by span and context, so that one long prompt beside decoding rows pads nobody, and
long spans are cut into chunks that score no key above their own end. What depends on the lengths
alone (indices, masks, buffers) is planned once a step and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

SEGMENT = 256  # keys of one matmul in P @ V; segments are added in order
TILE = 64  # context is padded to a multiple of this, or of the block
QUERY_CHUNK = 64  # queries of one row in a group
GROUP_KEYS = 2048  # rows * padded context of a group: keeps the gathered copy in cache
FEW_QUERIES = 16  # up to here a group may hold contexts of other lengths


class Geometry(NamedTuple):
    """Sizes that an index depends on; query_stride counts heads from one token's to the next's."""

    num_heads: int
    query_stride: int
    num_kv_heads: int
    block_size: int


class Piece(NamedTuple):
    """Queries of one row that are attended together.

    token: first query token; num_queries: how many; kv_len: context up to the last of them;
    row_kv_len: context of the whole row, behind which slots may hold anything.
    """

    row: int
    token: int
    num_queries: int
    kv_len: int
    row_kv_len: int


class Group(NamedTuple):
    """Pieces that run as one batch of R*G products: P packed queries on W padded keys.

    blocks: pool blocks of one KV head each, in the order of the gathered keys [R*G, W].
    dead: gathered keys, then values, behind a row's context: slots that may hold anything.
    queries: row of q of each packed query [R*G, P]; padding repeats the first query.
    bias_bPW: 0 where a query may see a key, else -inf; one for all heads if there is one row.

    The rest are views of buffers that all groups of a step share (``out_bPD`` is the group's own):
    where the gathered blocks go, how the products read them, and the pairs of segments to add up.
    """

    blocks: torch.Tensor
    dead: torch.Tensor
    queries: torch.Tensor
    bias_bPW: torch.Tensor
    k_nBD: torch.Tensor
    v_nBD: torch.Tensor
    kv_xD: torch.Tensor
    q_xD: torch.Tensor
    q_bPD: torch.Tensor
    k_bDW: torch.Tensor
    scores_bPW: torch.Tensor
    segments: list[tuple[torch.Tensor, torch.Tensor]]
    out_bPD: torch.Tensor


@dataclass
class AttentionPlan:
    """What the layers of a step share on the CPU path: filled by the first, read by the others.

    groups: None until the first layer.
    packed_xD: the outputs of all groups, and one row of zeros for tokens of no row.
    outputs: row of ``packed_xD`` of each (token, head).
    """

    groups: list[Group] | None = None
    packed_xD: torch.Tensor | None = None
    outputs: torch.Tensor | None = None


class Index(NamedTuple):
    """A group before it has buffers; fields as in Group, and its sizes R*G, P, W."""

    blocks: np.ndarray
    dead: np.ndarray
    queries: np.ndarray
    bias_bPW: np.ndarray
    packed: np.ndarray
    outputs: np.ndarray
    shape: tuple[int, int, int]


def padded_width(kv_len: int, block_size: int) -> int:
    """Keys after padding: 0, 64 or 128 over a multiple of 256 (192 changes bits), whole blocks."""
    unit = max(TILE, block_size)
    width = -(-kv_len // unit) * unit
    return width + TILE if width % SEGMENT == 192 else width


def cut_pieces(starts: tuple[int, ...], kv_lens: tuple[int, ...]) -> list[Piece]:
    """Cut every row's queries into chunks of at most QUERY_CHUNK; empty rows give none."""
    pieces = []
    for row, kv_len in enumerate(kv_lens):
        begin, end = starts[row], starts[row + 1]
        for token in range(begin, end if kv_len else begin, QUERY_CHUNK):
            num_queries = min(QUERY_CHUNK, end - token)
            pieces.append(
                Piece(row, token, num_queries, kv_len - (end - token) + num_queries, kv_len)
            )
    return pieces


def group_pieces(pieces: list[Piece], block_size: int) -> list[list[Piece]]:
    """Group pieces of like span and context; padding at most doubles either."""
    groups: list[list[Piece]] = []
    limits = (-1, 0, 0)  # span class, least padded context and most pieces of the last group
    for piece in sorted(pieces, key=lambda p: (p.num_queries.bit_length(), p.kv_len), reverse=True):
        span_class = piece.num_queries.bit_length()
        width = padded_width(piece.kv_len, block_size)
        if limits[0] == span_class and width >= limits[1] and len(groups[-1]) < limits[2]:
            groups[-1].append(piece)
        else:
            # Many queries are bound by arithmetic, which padding would waste.
            least = width // 2 if piece.num_queries <= FEW_QUERIES else width
            limits = (span_class, least, GROUP_KEYS // width)
            groups.append([piece])
    return groups


def index_group(pieces: list[Piece], block_table_RM: np.ndarray, geometry: Geometry) -> Index:
    """Where the pieces' blocks, queries and outputs lie, and what each query may not see."""
    num_heads, query_stride, num_kv_heads, block_size = geometry
    group_size = num_heads // num_kv_heads
    row, token, span, kv_len, row_kv_len = np.array(pieces).T[:, :, None]  # each [R, 1]
    num_packed = -(-int(span.max()) * group_size // 4) * 4
    width = max(padded_width(piece.kv_len, block_size) for piece in pieces)
    shape = (len(pieces) * num_kv_heads, num_packed, width)
    heads_G1 = np.arange(num_kv_heads)[:, None]
    keys_1W = np.arange(width)[None]

    column_Rn = np.minimum(np.arange(width // block_size), (kv_len - 1) // block_size)
    blocks_R1n = block_table_RM[row, column_Rn].astype(np.int64)[:, None]
    dead_RGW = np.broadcast_to((keys_1W >= row_kv_len)[:, None], (len(row), num_kv_heads, width))
    dead = np.flatnonzero(dead_RGW)

    packed_1P = np.arange(num_packed)[None]
    is_real_RP = packed_1P // group_size < span
    query_RP = np.where(is_real_RP, packed_1P // group_size, 0)
    heads_GP = heads_G1 * group_size + packed_1P % group_size
    token_R1P = (token + query_RP)[:, None]
    hidden_RPW = keys_1W[:, None] > (kv_len - span + query_RP)[:, :, None]
    bias_RPW = np.where(hidden_RPW, np.float32("-inf"), np.float32(0.0))
    if len(row) > 1:
        bias_RPW = np.repeat(bias_RPW, num_kv_heads, axis=0)

    outputs_RGP = token_R1P * num_heads + heads_GP
    packed = np.flatnonzero(np.broadcast_to(is_real_RP[:, None], outputs_RGP.shape))
    return Index(
        blocks=(blocks_R1n * num_kv_heads + heads_G1).reshape(-1),
        dead=np.concatenate((dead, dead + dead_RGW.size)),
        queries=(token_R1P * query_stride + heads_GP).reshape(-1),
        bias_bPW=bias_RPW,
        packed=packed,
        outputs=outputs_RGP.reshape(-1)[packed],
        shape=shape,
    )


def build_groups(
    indices: list[Index], packed_xD: torch.Tensor, block_size: int, head_dim: int
) -> list[Group]:
    """Give the groups their buffers: one set as large as the largest needs, for all of them."""
    num_keys = max((batch * width for batch, _, width in (i.shape for i in indices)), default=0)
    num_queries = max(
        (batch * packed for batch, packed, _ in (i.shape for i in indices)), default=0
    )
    num_scores = max((b * p * w for b, p, w in (i.shape for i in indices)), default=0)
    kv_xD = packed_xD.new_empty(2 * num_keys, head_dim)
    q_xD = packed_xD.new_empty(num_queries, head_dim)
    scores_x = packed_xD.new_empty(num_scores)
    groups, first = [], 0
    for index in indices:
        batch, packed, width = index.shape
        k_xD, v_xD = kv_xD[: 2 * batch * width].chunk(2)
        v_bWD = v_xD.view(batch, width, head_dim)
        scores_bPW = scores_x[: batch * packed * width].view(index.shape)
        last = first + batch * packed
        groups.append(
            Group(
                *(torch.from_numpy(part) for part in index[:4]),
                k_nBD=k_xD.view(-1, block_size, head_dim),
                v_nBD=v_xD.view(-1, block_size, head_dim),
                kv_xD=kv_xD[: 2 * batch * width],
                q_xD=q_xD[: batch * packed],
                q_bPD=q_xD[: batch * packed].view(batch, packed, head_dim),
                k_bDW=k_xD.view(batch, width, head_dim).transpose(1, 2),
                scores_bPW=scores_bPW,
                segments=list(
                    zip(scores_bPW.split(SEGMENT, 2), v_bWD.split(SEGMENT, 1), strict=True)
                ),
                out_bPD=packed_xD[first:last].view(batch, packed, head_dim),
            )
        )
        first = last
    return groups


def fill_plan(
    plan: AttentionPlan,
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
) -> AttentionPlan:
    """Build a step's plan from its lengths, its block table and the layout of q; return it."""
    num_tokens, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_NGBD.shape
    geometry = Geometry(num_heads, _query_stride(q_THD), num_kv_heads, block_size)
    pieces = cut_pieces(tuple(query_starts_R1.tolist()), tuple(kv_lens_R.tolist()))
    table = block_table_RM.numpy()
    indices = [index_group(group, table, geometry) for group in group_pieces(pieces, block_size)]
    num_packed = sum(batch * packed for batch, packed, _ in (i.shape for i in indices))
    packed_xD = q_THD.new_empty(num_packed + 1, head_dim)
    packed_xD[-1] = 0.0
    outputs = np.full(num_tokens * num_heads, num_packed, dtype=np.int64)
    first = 0
    for index in indices:
        outputs[index.outputs] = first + index.packed
        first += index.shape[0] * index.shape[1]
    plan.groups = build_groups(indices, packed_xD, block_size, head_dim)
    plan.packed_xD = packed_xD
    plan.outputs = torch.from_numpy(outputs)
    return plan


def _query_stride(q_THD: torch.Tensor) -> int:
    """Heads from one token's to the next's: q may be a view of a wider buffer."""
    head_dim = q_THD.shape[2]
    if q_THD.stride(0) % head_dim or q_THD.stride()[1:] != (head_dim, 1):
        return q_THD.shape[1]  # will be copied
    return q_THD.stride(0) // head_dim


def attend_group(
    q_xD: torch.Tensor, k_nBD: torch.Tensor, v_nBD: torch.Tensor, group: Group, scale: float
) -> None:
    """Compute a group's packed outputs into its ``out_bPD``."""
    torch.index_select(k_nBD, 0, group.blocks, out=group.k_nBD)
    torch.index_select(v_nBD, 0, group.blocks, out=group.v_nBD)
    torch.index_select(q_xD, 0, group.queries, out=group.q_xD)
    if group.dead.numel():
        group.kv_xD.index_fill_(0, group.dead, 0.0)
    scores_bPW = group.scores_bPW
    torch.baddbmm(group.bias_bPW, group.q_bPD, group.k_bDW, alpha=scale, out=scores_bPW)
    torch.softmax(scores_bPW, -1, out=scores_bPW)
    (probs_bPw, v_bwD), *others = group.segments
    torch.bmm(probs_bPw, v_bwD, out=group.out_bPD)
    for probs_bPw, v_bwD in others:
        group.out_bPD.baddbmm_(probs_bPw, v_bwD)


def paged_attention_cpu(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out_THD: torch.Tensor,
) -> torch.Tensor:
    """Attend on the CPU into ``out_THD``, fp32, as the filled ``plan`` says."""
    num_tokens, num_heads, head_dim = q_THD.shape
    block_shape = (-1, *k_cache_NGBD.shape[2:])
    query_stride = _query_stride(q_THD)
    if q_THD.stride() != (query_stride * head_dim, head_dim, 1):
        q_THD = q_THD.contiguous()
    q_xD = q_THD.as_strided(((num_tokens - 1) * query_stride + num_heads, head_dim), (head_dim, 1))
    k_nBD, v_nBD = k_cache_NGBD.view(block_shape), v_cache_NGBD.view(block_shape)
    for group in plan.groups:
        attend_group(q_xD, k_nBD, v_nBD, group, scale)
    torch.index_select(plan.packed_xD, 0, plan.outputs, out=out_THD.view(-1, head_dim))
    return out_THD
