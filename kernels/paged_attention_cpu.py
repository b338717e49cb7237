"""Paged attention on CPU tensors: the exactness rules of the Triton kernel at a usable speed.

One gather brings the keys and values of a group of rows together, the query heads that share a KV
head are packed into the rows of one batched matmul, and every size that could change the bits of a
query is fixed: query rows are a multiple of 4, keys are cut at multiples of 256 that are added in
order, and widths are those for which trailing zeros change no bit (measured on MKL, AVX2; the tests
compare bits). A query's result therefore depends on its own position and keys only.

Rows are grouped by span and context, so that one long prompt beside decoding rows pads nobody, and
long spans are cut into chunks that score no key above their own end. What depends on the lengths
alone (indices, masks) is planned once a step and shared by all layers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

SEGMENT = 256  # keys of one matmul in P @ V; segments are added in order
TILE = 64  # context is padded to a multiple of this, or of the block
QUERY_CHUNK = 64  # queries of one row in a group
GROUP_KEYS = 1024  # rows * padded context of a group: keeps the gathered copy in cache


class Geometry(NamedTuple):
    """Sizes that an index depends on; table_width is the number of columns of the block table."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    table_width: int


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
    """Index tensors of pieces that run as one batch (R pieces, W padded keys, P packed rows)."""

    blocks_Rn: torch.Tensor  # flat index into the block table
    heads_G1: torch.Tensor  # KV heads
    dead: torch.Tensor  # rows of the gathered values that lie behind the context
    queries: torch.Tensor  # [R*G*P] flat (token, head) index of each packed row
    mask_from: int  # keys before this one are visible to every query
    hidden_R1Pw: torch.Tensor  # bool: keys from mask_from on that a query may not see
    packed: torch.Tensor  # [tokens*H] packed row of each (token, head)
    tokens: torch.Tensor  # [tokens*H] flat (token, head) index in the output
    shape: tuple[int, int, int]  # R*G, P, W


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
    """Group pieces of like span and context: padding at most doubles either."""
    ordered = sorted(pieces, key=lambda p: (p.num_queries.bit_length(), p.kv_len), reverse=True)
    groups: list[list[Piece]] = []
    for piece in ordered:
        head = groups[-1][0] if groups else None
        if (
            head is not None
            and head.num_queries.bit_length() == piece.num_queries.bit_length()
            and padded_width(head.kv_len, block_size) <= 2 * padded_width(piece.kv_len, block_size)
            and (len(groups[-1]) + 1) * padded_width(head.kv_len, block_size) <= GROUP_KEYS
        ):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def build_group(pieces: list[Piece], geometry: Geometry) -> Group:
    """Build the index tensors of one group."""
    num_heads, num_kv_heads, block_size, table_width = geometry
    group_size = num_heads // num_kv_heads
    row, token, span, kv_len, row_kv_len = torch.tensor(pieces).T[:, :, None]  # each [R, 1]
    max_span = int(span.max())
    num_packed = -(-max_span * group_size // 4) * 4
    width = max(padded_width(piece.kv_len, block_size) for piece in pieces)
    keys_1W = torch.arange(width)[None]

    block_1n = torch.arange(width // block_size)[None]
    last_block = (kv_len - 1) // block_size
    blocks_Rn = row * table_width + torch.minimum(block_1n, last_block)

    packed_1P = torch.arange(num_packed)[None]
    real = packed_1P // group_size < span  # [R, P]
    query_RP = torch.where(real, packed_1P // group_size, 0)
    heads_GP = torch.arange(num_kv_heads)[:, None] * group_size + packed_1P % group_size
    flat_RGP = ((token + query_RP) * num_heads)[:, None, :] + heads_GP

    position_RP = kv_len - span + query_RP
    mask_from = int((kv_len - span).min()) + 1
    hidden_RPw = keys_1W[:, None, mask_from:] > position_RP[:, :, None]
    dead_RGW = (keys_1W >= row_kv_len)[:, None].expand(-1, num_kv_heads, -1)

    packed = real[:, None].expand_as(flat_RGP).reshape(-1).nonzero().squeeze(1)
    tokens, order = flat_RGP.reshape(-1)[packed].sort()
    return Group(
        blocks_Rn,
        torch.arange(num_kv_heads, dtype=torch.int32)[:, None],
        dead_RGW.reshape(-1).nonzero().squeeze(1),
        flat_RGP.reshape(-1),
        mask_from,
        hidden_RPw[:, None],
        packed[order],
        tokens,
        (len(pieces) * num_kv_heads, num_packed, width),
    )


@lru_cache(maxsize=4)
def plan(starts: tuple[int, ...], kv_lens: tuple[int, ...], geometry: Geometry) -> list[Group]:
    """Return the groups of one step; the layers of a step share them."""
    pieces = cut_pieces(starts, kv_lens)
    return [build_group(g, geometry) for g in group_pieces(pieces, geometry.block_size)]


def attend_group(
    q_xD: torch.Tensor,
    k_nBD: torch.Tensor,
    v_nBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    group: Group,
    scale: float,
) -> torch.Tensor:
    """Return the outputs of the group's (token, head) pairs, [tokens*H, D] fp32, in token order."""
    batch, num_packed, width = group.shape
    head_dim = q_xD.shape[-1]
    num_kv_heads = group.heads_G1.shape[0]
    block_ids_R1n = torch.take(block_table_RM, group.blocks_Rn)[:, None]
    ids = torch.add(group.heads_G1, block_ids_R1n, alpha=num_kv_heads).view(-1)
    kv_2nBD = k_nBD.new_empty((2, *ids.shape, *k_nBD.shape[1:]))  # one buffer: fewer page faults
    for source_nBD, target_nBD in zip((k_nBD, v_nBD), kv_2nBD.unbind(), strict=True):
        torch.index_select(source_nBD, 0, ids, out=target_nBD)
    k_bWD, v_bWD = kv_2nBD.view(2, batch, width, head_dim).float().unbind()
    if group.dead.numel():
        v_bWD.view(-1, head_dim).index_fill_(0, group.dead, 0.0)

    q_bPD = q_xD.index_select(0, group.queries).view(batch, num_packed, head_dim).float()
    scores_bPW = q_bPD.new_empty(batch, num_packed, width)
    scores_bPW.baddbmm_(q_bPD, k_bWD.transpose(1, 2), beta=0, alpha=scale)
    if group.mask_from < width:
        tail = scores_bPW.view(-1, num_kv_heads, num_packed, width)
        tail = tail.narrow(3, group.mask_from, width - group.mask_from)
        tail.masked_fill_(group.hidden_R1Pw, float("-inf"))
    probs_bPW = torch.softmax(scores_bPW, -1, out=scores_bPW)
    segments = zip(probs_bPW.split(SEGMENT, 2), v_bWD.split(SEGMENT, 1), strict=True)
    out_bPD = torch.bmm(*next(segments))
    for p_bPw, v_bwD in segments:
        out_bPD.baddbmm_(p_bPw, v_bwD)
    return out_bPD.view(-1, head_dim).index_select(0, group.packed)


def paged_attention_cpu(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
    scale: float,
    out_THD: torch.Tensor,
) -> torch.Tensor:
    """Attend on the CPU into ``out_THD``; arguments as in ``paged_attention``."""
    num_tokens, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_NGBD.shape
    geometry = Geometry(num_heads, num_kv_heads, block_size, block_table_RM.shape[1])
    groups = plan(tuple(query_starts_R1.tolist()), tuple(kv_lens_R.tolist()), geometry)
    q_xD = q_THD.reshape(-1, head_dim)
    k_nBD = k_cache_NGBD.view(-1, block_size, head_dim)
    v_nBD = v_cache_NGBD.view(-1, block_size, head_dim)
    if sum(group.tokens.numel() for group in groups) < num_tokens * num_heads:
        out_THD.zero_()
    out_xD = out_THD.view(-1, head_dim)
    for group in groups:
        rows = attend_group(q_xD, k_nBD, v_nBD, block_table_RM, group, scale)
        if rows.shape == out_xD.shape:
            out_xD.copy_(rows)
        else:
            out_xD.index_copy_(0, group.tokens, rows.to(out_xD.dtype))
    return out_THD
