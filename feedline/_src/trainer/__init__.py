"""Trains a model of your own on the batches of a feed: `fit`. The bundled MLP is its first user.

::

    fitting      `fit`: checks of its arguments, resuming, evaluation, history, callbacks
    task         what is trained: initial state, one step, metrics; pure functions without devices
    modes        compiles a task for one device, a mesh, or pmap; practices: donation, dtypes, sharding
    loop         runs a step on every batch, measures it, and names the rows of a bad loss; evaluates
    checkpoints  saves the trainer's state and the feed's with Orbax, and restores them
    model        the MLP (flax.nnx) and its loss
    live, logs   callbacks: a line of progress, CSV, TensorBoard
    memory       watches what the loop holds in memory, and names what grows

It imports no stage of feedline: a batch is a tree of global arrays from any source.
"""
