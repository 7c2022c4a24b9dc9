"""`feedline inspect` describes a source, each process's rows, memory, epochs, and batch sizes that fit."""
