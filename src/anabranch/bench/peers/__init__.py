"""Other engines as contenders, each in a process of its own, often in an environment of its own.

    catalogue      what there is: names, options, requirements
    environments   the virtual environments, made by ``anabranch bench peers install``
    process        our end of the wire: JSON lines, time limits, checks of what comes back
    launch         from a name and a target to a running peer
    servers/       the other end, one script an engine; they run in the peer's interpreter and import nothing of ours

Names may carry options, as drafters do: ``openvino:format=int8``.
"""

from __future__ import annotations

from anabranch.bench.peers.catalogue import PEERS, PeerSpec, parse_peer
from anabranch.bench.peers.launch import open_peer
from anabranch.bench.peers.process import Peer, PeerError

__all__ = ["PEERS", "Peer", "PeerError", "PeerSpec", "open_peer", "parse_peer"]
