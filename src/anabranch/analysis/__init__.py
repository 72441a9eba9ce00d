"""Analysis of speculative decoding: closed forms, draft costs, traces, and a simulator that replays traces."""
