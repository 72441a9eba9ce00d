"""The size of drafts and the drafter of each row: measured costs, the controller, the choice of a drafter."""
