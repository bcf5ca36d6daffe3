"""Move running samples between slices: how long they last, what to move, and the move."""
