"""What `feedline inspect` describes: a source, who reads what of it, memory, epochs, and batch sizes that fit."""
