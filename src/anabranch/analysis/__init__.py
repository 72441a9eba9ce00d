"""What speculation should give and what it gave: closed forms, costs, traces, and a simulator that replays them."""
