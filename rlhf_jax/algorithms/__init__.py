"""What a run may learn, a file each: who scores, how rewards become columns, and the losses."""
