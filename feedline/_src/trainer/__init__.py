"""Trains your own model on the batches of a feed: `fit`. `feedline train` uses `fit` for the bundled MLP.

::

    fitting      `fit`: checks of its arguments, resuming, evaluation, history, callbacks
    task         what is trained: initial state, one step, metrics; pure functions without devices
    modes        compiles a task for one device, a mesh, or pmap; practices: donation, dtypes, sharding
    loop         runs a step on every batch, measures the time, and names the rows of a bad loss; evaluates
    checkpoints  saves the states of trainer and feed with Orbax, and restores them
    model        the MLP (flax.nnx) and its loss
    live, logs   callbacks: a line of progress, CSV, TensorBoard
    memory       watches what the loop holds in memory, and names what grows

The trainer imports no stage of feedline: a batch is a tree of global arrays from any iterator.
"""
