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
    """Index tensors (int64) of pieces that run as one batch: P packed queries on W padded keys.

    blocks: pool blocks of one KV head each, in the order of the gathered keys [R*G, W].
    dead: gathered keys behind a row's context; their values may hold anything.
    queries: row of q of each packed query [R*G, P]; padding repeats the first query.
    hidden: entries of the scores [R*G, P, W] that a query may not see.
    packed: packed query of each (token, head), tokens in order.
    tokens: these (token, head) pairs, as rows of the output.
    shape: R*G, P, W.
    """

    blocks: torch.Tensor
    dead: torch.Tensor
    queries: torch.Tensor
    hidden: torch.Tensor
    packed: torch.Tensor
    tokens: torch.Tensor
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


def build_group(pieces: list[Piece], block_table_RM: torch.Tensor, geometry: Geometry) -> Group:
    """Build the index tensors of one group."""
    num_heads, query_stride, num_kv_heads, block_size = geometry
    group_size = num_heads // num_kv_heads
    row, token, span, kv_len, row_kv_len = torch.tensor(pieces).T[:, :, None]  # each [R, 1]
    num_packed = -(-int(span.max()) * group_size // 4) * 4
    width = max(padded_width(piece.kv_len, block_size) for piece in pieces)
    shape = (len(pieces) * num_kv_heads, num_packed, width)
    heads_G1 = torch.arange(num_kv_heads)[:, None]
    keys_1W = torch.arange(width)[None]

    column_Rn = torch.arange(width // block_size).minimum((kv_len - 1) // block_size)
    blocks_R1n = block_table_RM[row, column_Rn].long()[:, None]
    dead_RGW = (keys_1W >= row_kv_len)[:, None].expand(-1, num_kv_heads, -1)

    packed_1P = torch.arange(num_packed)[None]
    is_real_RP = packed_1P // group_size < span
    query_RP = torch.where(is_real_RP, packed_1P // group_size, 0)
    heads_GP = heads_G1 * group_size + packed_1P % group_size
    token_R1P = (token + query_RP)[:, None]
    hidden_RPW = keys_1W[:, None] > (kv_len - span + query_RP)[:, :, None]
    hidden_RGPW = hidden_RPW[:, None].expand(-1, num_kv_heads, -1, -1)

    outputs_RGP = token_R1P * num_heads + heads_GP
    packed = _indices(is_real_RP[:, None].expand_as(outputs_RGP))
    tokens, order = outputs_RGP.reshape(-1)[packed].sort()
    return Group(
        blocks=(blocks_R1n * num_kv_heads + heads_G1).reshape(-1),
        dead=_indices(dead_RGW),
        queries=(token_R1P * query_stride + heads_GP).reshape(-1),
        hidden=_indices(hidden_RGPW),
        packed=packed[order],
        tokens=tokens,
        shape=shape,
    )


def _indices(mask: torch.Tensor) -> torch.Tensor:
    return mask.reshape(-1).nonzero().squeeze(1)


@lru_cache(maxsize=4)
def plan(starts: bytes, kv_lens: bytes, table: bytes, geometry: Geometry) -> list[Group]:
    """Return the groups of one step from the bytes of its int32 tensors; all layers share them."""
    with torch.inference_mode(False):
        starts_R1, kv_lens_R, table_x = (
            torch.frombuffer(bytearray(data), dtype=torch.int32)
            for data in (starts, kv_lens, table)
        )
        pieces = cut_pieces(tuple(starts_R1.tolist()), tuple(kv_lens_R.tolist()))
        groups = group_pieces(pieces, geometry.block_size)
        return [build_group(group, table_x.view(len(kv_lens_R), -1), geometry) for group in groups]


def attend_group(
    q_xD: torch.Tensor, k_nBD: torch.Tensor, v_nBD: torch.Tensor, group: Group, scale: float
) -> torch.Tensor:
    """Return the packed outputs of a group, [R*G*P, D] fp32."""
    batch, num_packed, width = group.shape
    head_dim = q_xD.shape[-1]
    kv_2xD = k_nBD.new_empty(2, batch * width, head_dim)  # one buffer: fewer page faults
    k_xD, v_xD = kv_2xD.unbind()
    block_shape = (-1, *k_nBD.shape[1:])
    torch.index_select(k_nBD, 0, group.blocks, out=k_xD.view(block_shape))
    torch.index_select(v_nBD, 0, group.blocks, out=v_xD.view(block_shape))
    q_xD = q_xD.index_select(0, group.queries)
    if k_nBD.dtype != torch.float32:
        q_xD, k_xD, v_xD = q_xD.float(), k_xD.float(), v_xD.float()
    if group.dead.numel():
        v_xD.index_fill_(0, group.dead, 0.0)
    q_bPD = q_xD.view(batch, num_packed, head_dim)
    v_bWD = v_xD.view(batch, width, head_dim)
    k_bDW = k_xD.view(batch, width, head_dim).transpose(1, 2)

    scores_bPW = q_xD.new_empty(batch, num_packed, width)
    scores_bPW.baddbmm_(q_bPD, k_bDW, beta=0, alpha=scale)
    if group.hidden.numel():
        scores_bPW.view(-1).index_fill_(0, group.hidden, float("-inf"))
    probs_bPW = torch.softmax(scores_bPW, -1, out=scores_bPW)
    out_bPD = torch.bmm(probs_bPW[:, :, :SEGMENT], v_bWD[:, :SEGMENT])
    for start in range(SEGMENT, width, SEGMENT):
        end = min(start + SEGMENT, width)
        out_bPD.baddbmm_(probs_bPW[:, :, start:end], v_bWD[:, start:end])
    return out_bPD.view(-1, head_dim)


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
    if q_THD.stride(0) % head_dim or q_THD.stride()[1:] != (head_dim, 1):
        q_THD = q_THD.contiguous()
    query_stride = q_THD.stride(0) // head_dim  # q may be a view of a wider buffer
    q_xD = q_THD.as_strided(((num_tokens - 1) * query_stride + num_heads, head_dim), (head_dim, 1))
    out_xD = out_THD.view(-1, head_dim)
    lengths = (query_starts_R1, kv_lens_R, block_table_RM)
    groups = plan(
        *(tensor_x.numpy().tobytes() for tensor_x in lengths),
        Geometry(num_heads, query_stride, num_kv_heads, block_size),
    )
    k_nBD = k_cache_NGBD.view(-1, block_size, head_dim)
    v_nBD = v_cache_NGBD.view(-1, block_size, head_dim)
    if sum(group.tokens.numel() for group in groups) < out_xD.shape[0]:
        out_xD.zero_()
    for group in groups:
        packed_xD = attend_group(q_xD, k_nBD, v_nBD, group, scale).to(out_xD.dtype)
        if group.tokens.numel() == out_xD.shape[0]:
            torch.index_select(packed_xD, 0, group.packed, out=out_xD)
        else:
            out_xD.index_copy_(0, group.tokens, packed_xD.index_select(0, group.packed))
    return out_THD
