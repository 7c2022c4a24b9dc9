"""`feedline doctor` finds known problems of a machine, a feed or a job; `feedline diagnose` times input stages."""
