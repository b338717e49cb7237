"""Other engines on the same weights, prompts and threads."""

from pagedraft.bench.peers.base import (
    MODES,
    Peer,
    PeerFailed,
    PeerRun,
    PeerUnavailable,
    close_peers,
    open_peers,
)
from pagedraft.bench.peers.in_transformers import TransformersPeer

__all__ = [
    "MODES",
    "Peer",
    "PeerFailed",
    "PeerRun",
    "PeerUnavailable",
    "TransformersPeer",
    "close_peers",
    "open_peers",
]
