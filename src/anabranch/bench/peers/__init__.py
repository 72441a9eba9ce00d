"""Other engines as contenders, each in its own process and often in its own environment.

    catalogue      the peers: names, options, requirements
    environments   virtual environments, created by ``anabranch bench peers install``
    process        our end of the protocol: JSON lines, timeouts, validation of replies
    launch         start a peer for a target
    servers/       the other end, one script per engine, which runs in the peer's interpreter without our package

Names may have options, like those of drafters: ``openvino:format=int8``.
"""

from __future__ import annotations

from anabranch.bench.peers.catalogue import PEERS, PeerSpec, parse_peer
from anabranch.bench.peers.launch import open_peer
from anabranch.bench.peers.process import Peer, PeerError

__all__ = ["PEERS", "Peer", "PeerError", "PeerSpec", "open_peer", "parse_peer"]
