"""What decides how much is drafted, and by which drafter: measured costs, the controller, the choice of a drafter."""
