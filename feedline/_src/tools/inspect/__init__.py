"""`feedline inspect` describes a source, which process reads which rows, memory, epochs, and sizes that fit."""
